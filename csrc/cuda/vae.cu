// Starts the kernels of elbo_loss and expansion_distances.
#include "vae.cuh"

namespace levit {
namespace {

constexpr int kDoesNotFit = -1;
constexpr int kFewestRows = 8;  // a warp

int64_t blocks_of(const LevitVae& call, int rows) { return (call.batch + rows - 1) / rows; }

// Many images to a block reuse its weights; but every processor should have a block, and the block its memory.
template <class T, int kUsedLayers>
VaePlan plan_for(const LevitVae& call) {
  int rows = kVaeRows;
  const auto too_many = [&] {
    return plan_vae<T, kUsedLayers>(call, rows).shared_bytes > call.shared_bytes ||
           blocks_of(call, rows) * call.experts < call.processors;
  };
  while (rows > kFewestRows && too_many()) rows /= 2;
  return plan_vae<T, kUsedLayers>(call, rows);
}

template <class F>
auto with_type(int type, F&& f) {
  if (type == kLevitBFloat16) return f.template operator()<gpu::bf16>();
  if (type == kLevitHalf) return f.template operator()<gpu::f16>();
  return f.template operator()<float>();
}

VaePlan plan_of(const LevitVae& call) {
  return with_type(call.type, [&]<class T>() {
    return call.query ? plan_for<T, kDecoder1>(call) : plan_for<T, kLayers>(call);
  });
}

dim3 grid_of(const LevitVae& call, const VaePlan& plan) {
  return dim3(static_cast<unsigned>(blocks_of(call, plan.rows)), call.experts);
}

}  // namespace
}  // namespace levit

extern "C" int levit_vae_fits(const LevitVae* call) {
  return levit::plan_of(*call).shared_bytes <= call->shared_bytes;
}

extern "C" int64_t levit_expansion_distances_partials(const LevitVae* call) {
  const int rows = levit::plan_of(*call).rows;
  return levit::blocks_of(*call, rows) * (rows * levit::kVaeThreadsPerRow / 32);
}

extern "C" int levit_elbo_loss(const LevitVae* pointer, void* stream) {
  const LevitVae& call = *pointer;
  const levit::VaePlan plan = levit::plan_of(call);
  if (plan.shared_bytes > call.shared_bytes) return levit::kDoesNotFit;
  const dim3 grid = levit::grid_of(call, plan), block(plan.rows * levit::kVaeThreadsPerRow);
  return levit::with_type(call.type, [&]<class T>() {
    return LEVIT_LAUNCH((levit::elbo_loss<T>), grid, block, plan.shared_bytes, stream, call, plan);
  });
}

extern "C" int levit_expansion_distances(const LevitVae* pointer, void* stream) {
  const LevitVae& call = *pointer;
  const levit::VaePlan plan = levit::plan_of(call);
  if (plan.shared_bytes > call.shared_bytes) return levit::kDoesNotFit;
  const dim3 grid = levit::grid_of(call, plan), block(plan.rows * levit::kVaeThreadsPerRow);
  const int status = levit::with_type(call.type, [&]<class T>() {
    return LEVIT_LAUNCH((levit::expansion_distances<T>), grid, block, plan.shared_bytes, stream, call, plan);
  });
  if (status) return status;
  const int64_t partials = levit_expansion_distances_partials(pointer);
  return LEVIT_LAUNCH((levit::mean_of_partials<float>), dim3(call.experts), dim3(32), 0, stream, call.partial, partials,
                      call.batch, call.out);
}
