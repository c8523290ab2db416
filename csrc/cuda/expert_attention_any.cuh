// expert_attention without tensor cores: float32, and what the tiles of expert_attention_mma.cuh do not hold.
// Activations and the gated sum stay in shared memory in float, whatever the tensors are; the weights stream through
// two slabs, the next one, be it of the next expert, under way while this one is used.
#pragma once

#include <cmath>
#include <cstdint>

#include "expert_attention.h"
#include "gpu.h"
#include "slabs.cuh"
#include "used_experts.cuh"

namespace levit {

constexpr int kThreadsPerRow = 4;  // 16 that multiply 4 rows at a time; and 4 that share a query
constexpr int kMaxRows = 128;

// Lengths in numbers; distances of rows are odd, so that threads on different rows meet different banks.
struct AnyPlan {
  int images, rows;  // of a block; rows = images * tokens and a few that are idle
  int patch_stride, token_stride, head_stride, score_stride, out_stride;
  int embed_chunk, qkv_chunk;
  int shared_bytes;
};

template <class T>
AnyPlan plan_any(const LevitExpertAttention& call, int images) {
  AnyPlan plan;
  plan.images = images;
  plan.rows = (images * call.tokens + 7) / 8 * 8;  // whole warps
  plan.patch_stride = call.pixels | 1;
  plan.token_stride = call.width | 1;
  plan.head_stride = call.depth | 1;
  plan.score_stride = call.tokens | 1;
  plan.out_stride = (call.heads * call.depth) | 1;
  plan.embed_chunk = gpu::chunk_of<T>(call.w_embed, call.width);
  plan.qkv_chunk = gpu::chunk_of<T>(call.w_qkv, call.depth);
  const int64_t of_row =
      plan.patch_stride + plan.token_stride + 3 * plan.head_stride + plan.score_stride + plan.out_stride;
  const int64_t bytes = 2 * kSlab * sizeof(T) + 4 * (plan.rows * of_row + call.experts);
  plan.shared_bytes = static_cast<int>(bytes < INT32_MAX ? bytes : INT32_MAX);
  return plan;
}

// One slab of weights: matrix 0 is the embedding's, then head by head those of queries, keys and values.
struct Slab {
  int expert, matrix, column, row;
};

template <class T, class Out>
class AnyBlock {
 public:
  __device__ __forceinline__ AnyBlock(const LevitExpertAttention& of, const AnyPlan& p, unsigned char* memory)
      : call(of), plan(p) {
    slabs = reinterpret_cast<T*>(memory);
    patches = reinterpret_cast<float*>(slabs + 2 * kSlab);
    tokens = patches + plan.rows * plan.patch_stride;
    heads = tokens + plan.rows * plan.token_stride;
    scores = heads + 3 * plan.rows * plan.head_stride;
    out = scores + plan.rows * plan.score_stride;
    used = reinterpret_cast<int*>(out + plan.rows * plan.out_stride);
    first_image = static_cast<int64_t>(blockIdx.x) * plan.images;
    begin = call.gates.data ? 0 : blockIdx.y;
    end = call.gates.data ? call.experts : begin + 1;
  }

  __device__ __forceinline__ void run() {
    for (int expert = begin + threadIdx.x; expert < end; expert += blockDim.x) {
      used[expert] = is_used(call, first_image, plan.images, expert);
    }
    load_patches();
    const int query = threadIdx.x / kThreadsPerRow;
    for (int c = threadIdx.x % kThreadsPerRow; c < call.heads * call.depth; c += kThreadsPerRow) {
      out[query * plan.out_stride + c] = 0;  // by the thread that adds to it
    }
    __syncthreads();  // who is used
    Slab slab = {next_used(used, begin, end), 0, 0, 0};
    T *now = slabs, *then = slabs + kSlab;
    if (slab.expert < end) fill_slab(matrix(slab), slab.row, slab.column, now);
    gpu::commit_copies();
    float sums[kSide][kSide];
    while (slab.expert < end) {
      const Slab next = after(slab);
      gpu::wait_for_copies<0>();
      __syncthreads();  // this slab has come, the other one is free, and so are tokens, queries, keys and values
      if (next.expert < end) fill_slab(matrix(next), next.row, next.column, then);
      gpu::commit_copies();
      if (slab.row == 0) clear(sums);
      const float* x = (slab.matrix ? tokens : patches) + slab.row;
      const int stride = slab.matrix ? plan.token_stride : plan.patch_stride;
      add_slab(x, stride, min(kSlabRows, inputs(slab) - slab.row), now, sums);
      if (next.row == 0) {
        finish_columns(slab, sums);
        const bool head_done = slab.matrix && slab.matrix % 3 == 0 && next.column == 0;
        if (head_done) {
          __syncthreads();  // queries, keys and values are complete
          attend(slab.expert, (slab.matrix - 1) / 3);
        }
      }
      slab = next;
      T* const swap = now;
      now = then;
      then = swap;
    }
    write();
  }

 private:
  __device__ __forceinline__ int inputs(const Slab& slab) const { return slab.matrix ? call.width : call.pixels; }
  __device__ __forceinline__ int outputs(const Slab& slab) const { return slab.matrix ? call.depth : call.width; }
  // of the matrix among queries, keys, values, head by head, as the tensors have them
  __device__ __forceinline__ int place(const Slab& slab) const {
    return (slab.matrix - 1) % 3 * call.heads + (slab.matrix - 1) / 3;
  }

  __device__ __forceinline__ Slab after(Slab slab) const {
    slab.row += kSlabRows;
    if (slab.row < inputs(slab)) return slab;
    slab.row = 0;
    slab.column += kSlabColumns;
    if (slab.column < outputs(slab)) return slab;
    slab.column = 0;
    if (++slab.matrix <= 3 * call.heads) return slab;
    return {next_used(used, slab.expert + 1, end), 0, 0, 0};
  }

  __device__ __forceinline__ void load_patches() {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int row = threadIdx.x / 32; row < plan.rows; row += warps) {
      const int64_t image = first_image + row / call.tokens;
      const bool exists = row < plan.images * call.tokens && image < call.batch;
      const T* from = static_cast<const T*>(call.patches);
      if (exists) from += (image * call.tokens + row % call.tokens) * call.pixels;
      for (int c = lane; c < call.pixels; c += 32) {
        patches[row * plan.patch_stride + c] = exists ? gpu::to_float(from[c]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ Matrix<T> matrix(const Slab& slab) const {
    const int features = call.heads * call.depth, chunk = slab.matrix ? plan.qkv_chunk : plan.embed_chunk;
    if (!slab.matrix) {
      const T* weights = static_cast<const T*>(call.w_embed);
      weights += static_cast<int64_t>(slab.expert) * call.pixels * call.width;
      return {weights, call.width, call.pixels, call.width, chunk};
    }
    const T* weights = static_cast<const T*>(call.w_qkv) + place(slab) * call.depth;
    weights += static_cast<int64_t>(slab.expert) * call.width * 3 * features;
    return {weights, 3 * features, call.width, call.depth, chunk};
  }

  __device__ __forceinline__ void finish_columns(const Slab& slab, const float (&sums)[kSide][kSide]) {
    const int row = first_row(), column = slab.column + first_column();
    const T* bias = slab.matrix ? static_cast<const T*>(call.b_qkv) + place(slab) * call.depth
                                : static_cast<const T*>(call.b_embed);
    bias += static_cast<int64_t>(slab.expert) * (slab.matrix ? 3 * call.heads * call.depth : call.width);
    float* to = slab.matrix ? heads + (slab.matrix - 1) % 3 * plan.rows * plan.head_stride : tokens;
    const int stride = slab.matrix ? plan.head_stride : plan.token_stride;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (column + j >= outputs(slab)) break;
      const float offset = gpu::to_float(bias[column + j]);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        float sum = sums[i][j] + offset;
        if (!slab.matrix && !(sum > 0)) sum *= call.slope;
        to[(row + i) * stride + column + j] = sum;
      }
    }
  }

  // out += gate * softmax(q k^T / sqrt(d)) v of one head
  __device__ __forceinline__ void attend(int expert, int head) {
    const int query = threadIdx.x / kThreadsPerRow, part = threadIdx.x % kThreadsPerRow;
    const int own = query / call.tokens;  // the image within the block
    const bool exists = query < plan.images * call.tokens && first_image + own < call.batch;
    const float gate = exists ? gate_of(call.gates, first_image + own, expert, head) : 0.0f;
    const int keys = gate != 0.0f ? call.tokens : 0;
    const float* q = heads + query * plan.head_stride;
    const float* k = heads + (plan.rows + own * call.tokens) * plan.head_stride;
    const float* v = k + plan.rows * plan.head_stride;
    float* const powers = scores + query * plan.score_stride;
    const float scale = 1.44269504f / sqrtf(static_cast<float>(call.depth));
    float most = -INFINITY, total = 0;
    for (int key = part; key < keys; key += kThreadsPerRow) {
      float score = 0;
      for (int c = 0; c < call.depth; ++c) score += q[c] * k[key * plan.head_stride + c];
      powers[key] = score *= scale;
      most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    for (int key = part; key < keys; key += kThreadsPerRow) {
      const float power = exp2f(powers[key] - most);
      powers[key] = power;
      total += power;
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    __syncwarp();  // the powers of all four threads
    if (!keys) return;
    float* const to = out + query * plan.out_stride + head * call.depth;
    // column c of all heads together belongs to the thread c % 4 of its query, from the first zero to the last word
    for (int c = (part - head * call.depth) & (kThreadsPerRow - 1); c < call.depth; c += kThreadsPerRow) {
      float sum = 0;
      for (int key = 0; key < keys; ++key) sum += powers[key] * v[key * plan.head_stride + c];
      to[c] += gate * sum / total;
    }
  }

  __device__ __forceinline__ void write() const {
    const int query = threadIdx.x / kThreadsPerRow, features = call.heads * call.depth;
    const int64_t image = first_image + query / call.tokens;
    if (query >= plan.images * call.tokens || image >= call.batch) return;
    const int64_t row = (blockIdx.y * call.batch + image) * call.tokens + query % call.tokens;
    for (int c = threadIdx.x % kThreadsPerRow; c < features; c += kThreadsPerRow) {
      static_cast<Out*>(call.out)[row * features + c] = gpu::from_float<Out>(out[query * plan.out_stride + c]);
    }
  }

  const LevitExpertAttention& call;
  const AnyPlan& plan;
  T* slabs;
  float *patches, *tokens, *heads, *scores, *out;
  int* used;
  int64_t first_image;
  int begin, end;
};

template <class T, class Out>
__global__ void __launch_bounds__(kMaxRows* kThreadsPerRow)
    expert_attention_any(const LevitExpertAttention call, const AnyPlan plan) {
  LEVIT_SHARED(memory);
  AnyBlock<T, Out>(call, plan, memory).run();
}

}  // namespace levit
