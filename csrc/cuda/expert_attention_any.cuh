// expert_attention without tensor cores: float32, and what the tiles of expert_attention_mma.cuh do not hold. The gated
// sum stays in shared memory until all experts have added to it.
#pragma once

#include <cmath>
#include <cstdint>

#include "expert_layers.cuh"

namespace levit {

template <class T, class Out>
class AnyForward : public ExpertLayers<T, AnyForward<T, Out>> {
  using Layers = ExpertLayers<T, AnyForward<T, Out>>;
  using Layers::call, Layers::plan, Layers::heads, Layers::scores, Layers::rest, Layers::first_image;

 public:
  __device__ __forceinline__ AnyForward(const LevitExpertAttention& of, const AnyPlan& p, unsigned char* memory)
      : Layers(of, p, memory) {}

  __device__ __forceinline__ bool uses(int expert) const {
    return is_used(call, first_image, plan.images, expert);
  }

  __device__ __forceinline__ void begin() {
    for (int c = part(); c < call.heads * call.depth; c += kThreadsPerRow) rest[row() * plan.rest_stride + c] = 0;
  }

  __device__ __forceinline__ void keep_token(int, int, int, float) const {}
  __device__ __forceinline__ void prepare(int, int) const {}

  // out += gate * softmax(q k^T / sqrt(d)) v of one head
  __device__ __forceinline__ void attend(int expert, int head) {
    const int own = row() / call.tokens;  // the image within the block
    const float gate = this->exists(row()) ? gate_of(call.gates, first_image + own, expert, head) : 0.0f;
    const int keys = gate != 0.0f ? call.tokens : 0;
    const float* q = heads + row() * plan.head_stride;
    const float* k = heads + (plan.rows + own * call.tokens) * plan.head_stride;
    const float* v = k + plan.rows * plan.head_stride;
    float* const powers = scores + row() * plan.score_stride;
    const float scale = 1.44269504f / sqrtf(static_cast<float>(call.depth));
    float most = -INFINITY, total = 0;
    for (int key = part(); key < keys; key += kThreadsPerRow) {
      float score = 0;
      for (int c = 0; c < call.depth; ++c) score += q[c] * k[key * plan.head_stride + c];
      powers[key] = score *= scale;
      most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    for (int key = part(); key < keys; key += kThreadsPerRow) {
      const float power = exp2f(powers[key] - most);
      powers[key] = power;
      total += power;
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    __syncwarp();  // the powers of all four threads
    if (!keys) return;
    float* const to = rest + row() * plan.rest_stride + head * call.depth;
    // column c of all heads together belongs to the thread c % 4 of its query, from the first zero to the last word
    for (int c = (part() - head * call.depth) & (kThreadsPerRow - 1); c < call.depth; c += kThreadsPerRow) {
      float sum = 0;
      for (int key = 0; key < keys; ++key) sum += powers[key] * v[key * plan.head_stride + c];
      to[c] += gate * sum / total;
    }
  }

  __device__ __forceinline__ void end() const {
    if (!this->exists(row())) return;
    const int features = call.heads * call.depth;
    Out* const to = static_cast<Out*>(call.out);
    const int64_t at = (blockIdx.y * call.batch * call.tokens + this->place(row())) * features;
    for (int c = part(); c < features; c += kThreadsPerRow) {
      to[at + c] = gpu::from_float<Out>(rest[row() * plan.rest_stride + c]);
    }
  }

 private:
  __device__ __forceinline__ static int row() { return threadIdx.x / kThreadsPerRow; }
  __device__ __forceinline__ static int part() { return threadIdx.x % kThreadsPerRow; }
};

template <class T, class Out>
__global__ void __launch_bounds__(kMaxRows* kThreadsPerRow, 1)
    expert_attention_any(const __grid_constant__ LevitExpertAttention call, const __grid_constant__ AnyPlan plan) {
  LEVIT_SHARED(memory);
  const int begin = call.gates.data ? 0 : blockIdx.y;
  AnyForward<T, Out>(call, plan, memory).run(begin, call.gates.data ? call.experts : begin + 1);
}

}  // namespace levit
