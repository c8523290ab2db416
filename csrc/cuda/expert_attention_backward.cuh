// The backward pass of expert_attention from the result to queries, keys, values and gates. A block recomputes some
// images for one expert instead of reading back what the forward pass might have kept.
#pragma once

#include <cmath>
#include <cstdint>

#include "expert_attention_backward.h"
#include "expert_layers.cuh"
#include "sums.cuh"

namespace levit {

// What a row keeps besides the layers: its part of grad, the gradients of its scores, and their sum weighted by the
// probabilities.
inline int rest_of_backward(const LevitExpertAttention& call) { return (call.depth | 1) + (call.tokens | 1) + 1; }

template <class T, class Grad>
class AnyBackward : public ExpertLayers<T, AnyBackward<T, Grad>> {
  using Layers = ExpertLayers<T, AnyBackward<T, Grad>>;
  using Layers::call, Layers::plan, Layers::heads, Layers::scores, Layers::rest, Layers::first_image;

 public:
  __device__ __forceinline__ AnyBackward(const LevitExpertAttentionBackward& of, const AnyPlan& p,
                                         unsigned char* memory)
      : Layers(of.forward, p, memory), whole(of) {
    grads = rest;
    by_scores = grads + plan.rows * plan.head_stride;
    weighted = by_scores + plan.rows * plan.score_stride;
  }

  // An expert that is gated by zero still has a gradient of its gate.
  __device__ __forceinline__ bool uses(int) const { return true; }
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void end() const {}

  __device__ __forceinline__ void keep_token(int expert, int row, int column, float token) const {
    if (this->exists(row)) whole.tokens[global_row(expert, row) * call.width + column] = token;
  }

  __device__ __forceinline__ void prepare(int expert, int head) {
    const int features = call.heads * call.depth;
    const Grad* grad = static_cast<const Grad*>(whole.grad) + head * call.depth;
    if (this->exists(row())) grad += (call.gates.data ? this->place(row()) : global_row(expert, row())) * features;
    for (int c = part(); c < call.depth; c += kThreadsPerRow) {
      grads[row() * plan.head_stride + c] = this->exists(row()) ? gpu::to_float(grad[c]) : 0.0f;
    }
  }

  __device__ __forceinline__ void attend(int expert, int head) {
    const int own = row() / call.tokens, keys = this->exists(row()) ? call.tokens : 0;
    const float gate = keys ? gate_of(call.gates, first_image + own, expert, head) : 0.0f;
    const float* const q = heads + row() * plan.head_stride;
    const float* const k = heads + (plan.rows + own * call.tokens) * plan.head_stride;
    const float* const v = k + plan.rows * plan.head_stride;
    const float* const grad = grads + row() * plan.head_stride;
    float* const shares = scores + row() * plan.score_stride;
    float* const by_shares = by_scores + row() * plan.score_stride;
    const float scale = 1 / sqrtf(static_cast<float>(call.depth));

    // A query, by its four threads: probabilities and their gradients, then those of the scores.
    float most = -INFINITY, total = 0, sum = 0;
    for (int key = part(); key < keys; key += kThreadsPerRow) {
      float score = 0, by_share = 0;
      for (int c = 0; c < call.depth; ++c) {
        score += q[c] * k[key * plan.head_stride + c];
        by_share += grad[c] * v[key * plan.head_stride + c];
      }
      shares[key] = score *= scale;
      by_shares[key] = by_share;
      most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    for (int key = part(); key < keys; key += kThreadsPerRow) {
      const float power = expf(shares[key] - most);
      shares[key] = power;
      total += power;
      sum += power * by_shares[key];
    }
    total = sum_of_lanes<kThreadsPerRow>(total);
    sum = sum_of_lanes<kThreadsPerRow>(sum) / total;  // also what the output times its gradient adds up to
    for (int key = part(); key < keys; key += kThreadsPerRow) {
      const float share = shares[key] / total;
      // a gate of zero lets nothing of the expert through, NaN included
      by_shares[key] = gate == 0.0f ? 0.0f : gate * scale * share * (by_shares[key] - sum);
      shares[key] = gate == 0.0f ? 0.0f : gate * share;
    }
    if (part() == 0) weighted[row()] = sum;
    __syncthreads();  // all queries' probabilities and gradients of scores

    // A token, by its four threads: gradients of its query, its key and its value, and of the image's gate.
    if (!keys) return;
    const int features = call.heads * call.depth, first = own * call.tokens;
    float* const to = whole.by_qkv + global_row(expert, row()) * 3 * features + head * call.depth;
    const float* const queries = heads + first * plan.head_stride;
    for (int c = part(); c < call.depth; c += kThreadsPerRow) {
      float by_query = 0, by_key = 0, by_value = 0;
      for (int other = 0; other < call.tokens; ++other) {
        const int at = (first + other) * plan.score_stride + row() - first;
        by_query += by_shares[other] * k[other * plan.head_stride + c];
        by_key += by_scores[at] * queries[other * plan.head_stride + c];
        by_value += scores[at] * grads[(first + other) * plan.head_stride + c];
      }
      to[c] = gate == 0.0f ? 0.0f : by_query;
      to[features + c] = gate == 0.0f ? 0.0f : by_key;
      to[2 * features + c] = by_value;
    }
    if (call.gates.data && row() == first && part() == 0) {
      float of_image = 0;
      for (int other = 0; other < call.tokens; ++other) of_image += weighted[first + other];
      whole.by_gates[((first_image + own) * call.experts + expert) * call.heads + head] = of_image;
    }
  }

 private:
  __device__ __forceinline__ static int row() { return threadIdx.x / kThreadsPerRow; }
  __device__ __forceinline__ static int part() { return threadIdx.x % kThreadsPerRow; }
  __device__ __forceinline__ int64_t global_row(int expert, int row) const {
    return expert * call.batch * call.tokens + this->place(row);
  }

  const LevitExpertAttentionBackward& whole;
  float *grads, *by_scores, *weighted;
};

template <class T, class Grad>
__global__ void __launch_bounds__(kMaxRows* kThreadsPerRow)
    expert_attention_backward(const __grid_constant__ LevitExpertAttentionBackward call,
                              const __grid_constant__ AnyPlan plan) {
  LEVIT_SHARED(memory);
  AnyBackward<T, Grad>(call, plan, memory).run(blockIdx.y, blockIdx.y + 1);
}

}  // namespace levit
