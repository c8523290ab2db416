// Starts the kernels of task_attention.
#include <algorithm>

#include "task_attention.cuh"

namespace levit {
namespace {

constexpr int kDoesNotFit = -1;
constexpr int kFewestQueries = 8;  // a warp

template <class T>
int chunk_for(const LevitTaskAttention& call, bool back) {
  int chunk = std::min({gpu::chunk_of<T>(call.query, call.depth), gpu::chunk_of<T>(call.keys, call.depth),
                        gpu::chunk_of<T>(call.values, call.depth)});
  if (!back) return chunk;
  for (const int64_t apart : {call.grad_by.per_head, call.grad_by.per_image, call.grad_by.per_token}) {
    chunk = std::min(chunk, gpu::chunk_of<T>(call.grad, apart));
  }
  return chunk;
}

// scores: how many rows of them a query has
template <class T>
TaskPlan plan_task(const LevitTaskAttention& call, int queries, int scores) {
  const int of_group = call.heads / call.groups * call.tokens, size = static_cast<int>(sizeof(T));
  TaskPlan plan{};
  plan.queries = queries;
  plan.parts = (of_group + queries - 1) / queries;
  plan.chunk = chunk_for<T>(call, scores > 1);
  plan.tile_stride = kKeyDepth + 16 / size;
  plan.score_stride = call.patches | 1;
  plan.tile_bytes = 2 * size * std::max((queries + kKeys) * plan.tile_stride, kSlab);
  const int64_t bytes = plan.tile_bytes + int64_t{4} * scores * queries * plan.score_stride;
  plan.shared_bytes = static_cast<int>(std::min<int64_t>(bytes, INT32_MAX));
  return plan;
}

// As many queries to a block as share its keys, in blocks of about the same size, and whole warps of them.
template <class T>
TaskPlan plan_for(const LevitTaskAttention& call, int scores) {
  const int of_group = call.heads / call.groups * call.tokens, parts = (of_group + kMaxQueries - 1) / kMaxQueries;
  int queries = ((of_group + parts - 1) / parts + kFewestQueries - 1) / kFewestQueries * kFewestQueries;
  while (queries > kFewestQueries && plan_task<T>(call, queries, scores).shared_bytes > call.shared_bytes) {
    queries -= kFewestQueries;
  }
  return plan_task<T>(call, queries, scores);
}

template <class T>
int run(const LevitTaskAttention& call, void* stream, bool back) {
  const TaskPlan plan = plan_for<T>(call, back ? 2 : 1);
  if (plan.shared_bytes > call.shared_bytes) return kDoesNotFit;
  const dim3 grid(static_cast<unsigned>(call.batch * plan.parts), call.groups), block(kQueryThreads * plan.queries);
  if (back) return LEVIT_LAUNCH((task_attention_backward<T>), grid, block, plan.shared_bytes, stream, call, plan);
  return LEVIT_LAUNCH((task_attention<T>), grid, block, plan.shared_bytes, stream, call, plan);
}

int run_typed(const LevitTaskAttention& call, void* stream, bool back) {
  if (call.type == kLevitBFloat16) return run<gpu::bf16>(call, stream, back);
  if (call.type == kLevitHalf) return run<gpu::f16>(call, stream, back);
  return run<float>(call, stream, back);
}

}  // namespace
}  // namespace levit

extern "C" int levit_task_attention(const LevitTaskAttention* call, void* stream) {
  return levit::run_typed(*call, stream, false);
}

extern "C" int levit_task_attention_backward(const LevitTaskAttention* call, void* stream) {
  return levit::run_typed(*call, stream, true);
}

extern "C" int levit_task_attention_fits(const LevitTaskAttention* call) {
  using namespace levit;
  const bool wide = call->type == kLevitFloat;
  const TaskPlan plan = wide ? plan_for<float>(*call, 2) : plan_for<gpu::bf16>(*call, 2);
  return plan.shared_bytes <= call->shared_bytes;
}
