// Starts the kernels of expert_attention's backward pass: through attention, then one product per gradient of a weight
// and of what it was multiplied with.
#include <algorithm>

#include "expert_attention_backward.cuh"
#include "matrix_product.cuh"

namespace levit {
namespace {

constexpr int kDoesNotFit = -1;

template <class T>
AnyPlan plan_for(const LevitExpertAttention& call) {
  const int64_t of_each = (call.batch * call.experts + call.processors - 1) / call.processors;
  int images = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(64 / call.tokens, of_each)));
  const auto plan = [&] { return plan_any<T>(call, images, rest_of_backward(call)); };
  while (images > 1 && plan().shared_bytes > call.shared_bytes) --images;
  return plan();
}

template <class T>
bool fits(const LevitExpertAttention& call) {
  return call.tokens <= kMaxRows && plan_for<T>(call).shared_bytes <= call.shared_bytes;
}

// The gradients of weights [inputs, outputs] and their bias: of each expert x [rows, inputs], by_y [rows, outputs]
template <class T, class X>
int by_weights(const LevitExpertAttention& call, const X* x, int64_t x_per_expert, const float* by_y, int inputs,
               int outputs, void* by_weights, void* by_bias, void* stream) {
  const int64_t rows = call.batch * call.tokens;
  MatrixProduct<X, float, T> product{};
  product.a = {x, x_per_expert, 0, 1, inputs};
  product.b = {by_y, rows * outputs, 0, outputs, 1};
  product.out = static_cast<T*>(by_weights);
  product.rows = inputs;
  product.depth = rows;
  product.columns = outputs;
  product.terms = 1;
  product.column_sums = static_cast<T*>(by_bias);
  return multiply_matrices(product, call.experts, stream);
}

template <class T>
int by_tokens(const LevitExpertAttentionBackward& all, void* stream) {
  const LevitExpertAttention& call = all.forward;
  const int outputs = 3 * call.heads * call.depth;
  const int64_t rows = call.batch * call.tokens;
  MatrixProduct<float, T, float> product{};
  product.a = {all.by_qkv, rows * outputs, 0, outputs, 1};
  product.b = {static_cast<const T*>(call.w_qkv), int64_t{call.width} * outputs, 0, 1, outputs};
  product.out = all.by_tokens;
  product.rows = rows;
  product.depth = outputs;
  product.columns = call.width;
  product.terms = 1;
  product.tokens = all.tokens;
  product.slope = call.slope;
  return multiply_matrices(product, call.experts, stream);
}

template <class T>
int by_patches(const LevitExpertAttentionBackward& all, void* stream) {
  const LevitExpertAttention& call = all.forward;
  const int64_t rows = call.batch * call.tokens;
  MatrixProduct<float, T, T> product{};
  product.a = {all.by_tokens, 0, rows * call.width, call.width, 1};
  product.b = {static_cast<const T*>(call.w_embed), 0, int64_t{call.pixels} * call.width, 1, call.width};
  product.out = static_cast<T*>(all.by_patches);
  product.rows = rows;
  product.depth = call.width;
  product.columns = call.pixels;
  product.terms = call.experts;
  return multiply_matrices(product, 1, stream);
}

template <class T, class Grad>
int run(const LevitExpertAttentionBackward& all, void* stream) {
  const LevitExpertAttention& call = all.forward;
  if (!fits<T>(call)) return kDoesNotFit;
  const AnyPlan plan = plan_for<T>(call);
  const dim3 grid(static_cast<unsigned>((call.batch + plan.images - 1) / plan.images), call.experts);
  int status = LEVIT_LAUNCH((expert_attention_backward<T, Grad>), grid, dim3(kThreadsPerRow * plan.rows),
                            plan.shared_bytes, stream, all, plan);
  if (!status && all.by_w_qkv) {
    status = by_weights<T>(call, all.tokens, call.batch * call.tokens * call.width, all.by_qkv, call.width,
                           3 * call.heads * call.depth, all.by_w_qkv, all.by_b_qkv, stream);
  }
  if (!status && (all.by_w_embed || all.by_patches)) status = by_tokens<T>(all, stream);
  if (!status && all.by_w_embed) {
    status = by_weights<T>(call, static_cast<const T*>(call.patches), 0, all.by_tokens, call.pixels, call.width,
                           all.by_w_embed, all.by_b_embed, stream);
  }
  if (!status && all.by_patches) status = by_patches<T>(all, stream);
  return status;
}

}  // namespace
}  // namespace levit

extern "C" int levit_expert_attention_backward(const LevitExpertAttentionBackward* call, void* stream) {
  using namespace levit;
  const bool widens = call->forward.out_type != call->forward.type;
  if (call->forward.type == kLevitBFloat16) {
    return widens ? run<gpu::bf16, float>(*call, stream) : run<gpu::bf16, gpu::bf16>(*call, stream);
  }
  if (call->forward.type == kLevitHalf) {
    return widens ? run<gpu::f16, float>(*call, stream) : run<gpu::f16, gpu::f16>(*call, stream);
  }
  return run<float, float>(*call, stream);
}

extern "C" int levit_expert_attention_backward_fits(const LevitExpertAttentionBackward* call) {
  using namespace levit;
  return call->forward.type == kLevitFloat ? fits<float>(call->forward) : fits<gpu::bf16>(call->forward);
}
