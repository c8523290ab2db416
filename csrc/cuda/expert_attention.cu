// Chooses the kernel of expert_attention for a call's sizes and starts it.
#include <algorithm>

#include "expert_attention_any.cuh"
#include "expert_attention_mma.cuh"

namespace levit {
namespace {

constexpr int kDoesNotFit = -1;

// Enough images to a block to make use of its weights, but first a block for every processor.
int images_wanted(const LevitExpertAttention& call, int most) {
  const int64_t of_each = (call.batch + call.processors - 1) / call.processors;
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most, of_each)));
}

template <class Plan>
Plan largest(const LevitExpertAttention& call, int images, Plan (*plan)(const LevitExpertAttention&, int)) {
  while (images > 1 && plan(call, images).shared_bytes > call.shared_bytes) --images;
  return plan(call, images);
}

dim3 grid_of(const LevitExpertAttention& call, int images) {
  return dim3(static_cast<unsigned>((call.batch + images - 1) / images), call.gates.data ? 1 : call.experts);
}

// Both take start = false for the question whether they could.
template <class T, class Out, int kSteps, int kTiles>
int run_mma(const LevitExpertAttention& call, void* stream, bool start) {
  using Stages = MmaStages<kSteps, kTiles>;
  if (call.heads > Stages::kMaxWarps || call.heads * Stages::kPairs < kSteps) return kDoesNotFit;
  const int images = images_wanted(call, Stages::kMaxWarps / call.heads);
  const MmaPlan plan = largest<MmaPlan>(call, images, plan_mma<T, kSteps, kTiles>);
  if (plan.shared_bytes > call.shared_bytes) return kDoesNotFit;
  if (!start) return 0;
  return LEVIT_LAUNCH((expert_attention_mma<T, Out, kSteps, kTiles>), grid_of(call, plan.images),
                      dim3(32 * call.heads * plan.images), plan.shared_bytes, stream, call, plan);
}

template <class T, class Out>
int run_any(const LevitExpertAttention& call, void* stream, bool start) {
  if (call.tokens > kMaxRows) return kDoesNotFit;
  const auto plan_for = [](const LevitExpertAttention& of, int images) {
    return plan_any<T>(of, images, of.heads * of.depth);
  };
  const AnyPlan plan = largest<AnyPlan>(call, images_wanted(call, std::max(1, 64 / call.tokens)), plan_for);
  if (plan.shared_bytes > call.shared_bytes) return kDoesNotFit;
  if (!start) return 0;
  return LEVIT_LAUNCH((expert_attention_any<T, Out>), grid_of(call, plan.images), dim3(kThreadsPerRow * plan.rows),
                      plan.shared_bytes, stream, call, plan);
}

template <class T, class Out>
int run_on_tensor_cores(const LevitExpertAttention& call, void* stream, bool start) {
  if (call.tokens > kTile) return kDoesNotFit;
  const auto holds = [&](int steps, int tiles) { return call.width <= 16 * steps && call.depth <= 8 * tiles; };
  if (holds(4, 8)) return run_mma<T, Out, 4, 8>(call, stream, start);
  if (holds(7, 13)) return run_mma<T, Out, 7, 13>(call, stream, start);
  if (holds(8, 16)) return run_mma<T, Out, 8, 16>(call, stream, start);
  return kDoesNotFit;
}

// The type of the result is that of the patches, or float where gates of another type ask for it.
int run(const LevitExpertAttention& call, void* stream, bool start, bool tensor_cores) {
  const bool widens = call.out_type != call.type;
  if (call.type == kLevitFloat) return tensor_cores ? kDoesNotFit : run_any<float, float>(call, stream, start);
  const auto of = [&]<class T, class Out>() {
    return tensor_cores ? run_on_tensor_cores<T, Out>(call, stream, start) : run_any<T, Out>(call, stream, start);
  };
  if (call.type == kLevitBFloat16) {
    return widens ? of.template operator()<gpu::bf16, float>() : of.template operator()<gpu::bf16, gpu::bf16>();
  }
  return widens ? of.template operator()<gpu::f16, float>() : of.template operator()<gpu::f16, gpu::f16>();
}

}  // namespace
}  // namespace levit

extern "C" int levit_expert_attention_fits(const LevitExpertAttention* call) {
  if (!levit::run(*call, nullptr, false, true)) return 2;
  return levit::run(*call, nullptr, false, false) ? 0 : 1;
}

extern "C" int levit_expert_attention(const LevitExpertAttention* call, void* stream) {
  const int fits = levit_expert_attention_fits(call);
  return fits ? levit::run(*call, stream, true, fits == 2) : levit::kDoesNotFit;
}
