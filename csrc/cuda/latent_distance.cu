// Starts the kernels of latent_distance.
#include "latent_distance.cuh"

namespace levit {
namespace {

template <class T>
int forward(const LevitLatentDistance& call, void* stream) {
  const int64_t partials = levit_latent_distance_partials(call.samples);
  const int parts = static_cast<int>((partials + kDistanceWarps - 1) / kDistanceWarps);
  const int status = LEVIT_LAUNCH((latent_distance<T>), dim3(static_cast<unsigned>(call.experts * parts)),
                                  dim3(32 * kDistanceWarps), 0, stream, call, partials, parts);
  if (status) return status;
  return LEVIT_LAUNCH((mean_of_partials<float>), dim3(call.experts), dim3(32), 0, stream, call.partial, partials,
                      call.samples, call.out);
}

template <class T>
int backward(const LevitLatentDistance& call, void* stream) {
  const int64_t blocks = (call.samples + kDistanceWarps - 1) / kDistanceWarps;
  return LEVIT_LAUNCH((latent_distance_backward<T>), dim3(static_cast<unsigned>(blocks)), dim3(32 * kDistanceWarps), 0,
                      stream, call);
}

}  // namespace
}  // namespace levit

extern "C" int64_t levit_latent_distance_partials(int64_t samples) {
  return (samples + levit::kSamplesPerWarp - 1) / levit::kSamplesPerWarp;
}

extern "C" int levit_latent_distance(const LevitLatentDistance* call, void* stream) {
  if (call->type == kLevitBFloat16) return levit::forward<levit::gpu::bf16>(*call, stream);
  if (call->type == kLevitHalf) return levit::forward<levit::gpu::f16>(*call, stream);
  return levit::forward<float>(*call, stream);
}

extern "C" int levit_latent_distance_backward(const LevitLatentDistance* call, void* stream) {
  if (call->type == kLevitBFloat16) return levit::backward<levit::gpu::bf16>(*call, stream);
  if (call->type == kLevitHalf) return levit::backward<levit::gpu::f16>(*call, stream);
  return levit::backward<float>(*call, stream);
}
