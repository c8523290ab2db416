// Starts the kernels of dkf_fuse.
#include "dkf_fuse.cuh"

namespace levit {
namespace {

constexpr int kCount = 4;  // numbers that a thread takes at a time

template <class T>
bool aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % (kCount * sizeof(T)) == 0;
}

template <class T, class Out>
bool in_vectors(const LevitDkfFuse& call) {
  const bool lengths =
      call.width / call.heads % kCount == 0 && call.per_row % kCount == 0 && call.per_expert % kCount == 0;
  return lengths && aligned<T>(call.features) && aligned<Out>(call.out) && aligned<Out>(call.grad) &&
         aligned<T>(call.by_features);
}

template <class T, class Out, int kNumbers>
int forward(const LevitDkfFuse& call, void* stream) {
  const int parts = (call.tokens * call.width + kFuseThreads * kNumbers - 1) / (kFuseThreads * kNumbers);
  return LEVIT_LAUNCH((dkf_fuse<T, Out, kNumbers>), dim3(static_cast<unsigned>(call.batch * parts)), dim3(kFuseThreads),
                      0, stream, call, parts);
}

template <class T, class Out, int kNumbers>
int backward(const LevitDkfFuse& call, void* stream) {
  int status = 0;
  if (call.by_gates) {
    const int parts = (call.experts * call.heads + kGateWarps - 1) / kGateWarps;
    status = LEVIT_LAUNCH((dkf_fuse_by_gates<T, Out, kNumbers>), dim3(static_cast<unsigned>(call.batch * parts)),
                          dim3(32 * kGateWarps), 0, stream, call, parts);
  }
  if (call.by_features && !status) {
    const int parts = (call.tokens * call.width + kFuseThreads * kNumbers - 1) / (kFuseThreads * kNumbers);
    status = LEVIT_LAUNCH((dkf_fuse_by_features<T, Out, kNumbers>),
                          dim3(static_cast<unsigned>(call.rows * parts), call.experts), dim3(kFuseThreads), 0, stream,
                          call, parts);
  }
  return status;
}

template <class T, class Out>
int run(const LevitDkfFuse& call, void* stream, bool back) {
  if (in_vectors<T, Out>(call)) {
    return back ? backward<T, Out, kCount>(call, stream) : forward<T, Out, kCount>(call, stream);
  }
  return back ? backward<T, Out, 1>(call, stream) : forward<T, Out, 1>(call, stream);
}

// The gates may ask for a wider result than the features' type.
int run_typed(const LevitDkfFuse& call, void* stream, bool back) {
  const bool widens = call.out_type != call.type;
  if (call.type == kLevitBFloat16) {
    return widens ? run<gpu::bf16, float>(call, stream, back) : run<gpu::bf16, gpu::bf16>(call, stream, back);
  }
  if (call.type == kLevitHalf) {
    return widens ? run<gpu::f16, float>(call, stream, back) : run<gpu::f16, gpu::f16>(call, stream, back);
  }
  return run<float, float>(call, stream, back);
}

}  // namespace
}  // namespace levit

extern "C" int levit_dkf_fuse(const LevitDkfFuse* call, void* stream) { return levit::run_typed(*call, stream, false); }

extern "C" int levit_dkf_fuse_backward(const LevitDkfFuse* call, void* stream) {
  return levit::run_typed(*call, stream, true);
}
