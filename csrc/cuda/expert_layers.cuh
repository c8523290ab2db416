// The layers of expert_attention without tensor cores, for forward and backward pass alike: tokens, then head by head
// queries, keys and values of some images. They stay in shared memory in float, whatever the tensors are; the weights
// stream through two slabs, the next one, be it of the next expert, under way while this one is used.
#pragma once

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
  int patch_stride, token_stride, head_stride, score_stride, rest_stride;
  int embed_chunk, qkv_chunk;
  int shared_bytes;
};

// rest: what the pass itself keeps of each row
template <class T>
AnyPlan plan_any(const LevitExpertAttention& call, int images, int rest) {
  AnyPlan plan;
  plan.images = images;
  plan.rows = (images * call.tokens + 7) / 8 * 8;  // whole warps
  plan.patch_stride = call.pixels | 1;
  plan.token_stride = call.width | 1;
  plan.head_stride = call.depth | 1;
  plan.score_stride = call.tokens | 1;
  plan.rest_stride = rest | 1;
  plan.embed_chunk = gpu::chunk_of<T>(call.w_embed, call.width);
  plan.qkv_chunk = gpu::chunk_of<T>(call.w_qkv, call.depth);
  const int64_t of_row =
      plan.patch_stride + plan.token_stride + 3 * plan.head_stride + plan.score_stride + plan.rest_stride;
  const int64_t bytes = 2 * kSlab * sizeof(T) + 4 * (plan.rows * of_row + call.experts);
  plan.shared_bytes = static_cast<int>(bytes < INT32_MAX ? bytes : INT32_MAX);
  return plan;
}

// One slab of weights: matrix 0 is the embedding's, then head by head those of queries, keys and values.
struct Slab {
  int expert, matrix, column, row;
};

// Pass has: uses(expert), begin(), keep_token(expert, row, column, token), prepare(expert, head) before queries, keys
// and values are known to be complete, attend(expert, head) after that, end().
template <class T, class Pass>
class ExpertLayers {
 public:
  __device__ __forceinline__ void run(int begin, int end) {
    for (int expert = begin + threadIdx.x; expert < end; expert += blockDim.x) used[expert] = pass().uses(expert);
    load_patches();
    pass().begin();
    __syncthreads();  // who is used
    Slab slab = {next_used(used, begin, end), 0, 0, 0};
    T *now = slabs, *then = slabs + kSlab;
    if (slab.expert < end) fill_slab(matrix(slab), slab.row, slab.column, now);
    gpu::commit_copies();
    float sums[kSide][kSide];
    while (slab.expert < end) {
      const Slab next = after(slab, end);
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
        if (slab.matrix && slab.matrix % 3 == 0 && next.column == 0) {
          const int head = (slab.matrix - 1) / 3;
          pass().prepare(slab.expert, head);
          __syncthreads();  // queries, keys and values are complete
          pass().attend(slab.expert, head);
        }
      }
      slab = next;
      T* const swap = now;
      now = then;
      then = swap;
    }
    pass().end();
  }

 protected:
  __device__ __forceinline__ ExpertLayers(const LevitExpertAttention& of, const AnyPlan& p, unsigned char* memory)
      : call(of), plan(p) {
    slabs = reinterpret_cast<T*>(memory);
    patches = reinterpret_cast<float*>(slabs + 2 * kSlab);
    tokens = patches + plan.rows * plan.patch_stride;
    heads = tokens + plan.rows * plan.token_stride;
    scores = heads + 3 * plan.rows * plan.head_stride;
    rest = scores + plan.rows * plan.score_stride;
    used = reinterpret_cast<int*>(rest + plan.rows * plan.rest_stride);
    first_image = static_cast<int64_t>(blockIdx.x) * plan.images;
  }

  // Whether a row of the block is a token of an image
  __device__ __forceinline__ bool exists(int row) const {
    return row < plan.images * call.tokens && first_image + row / call.tokens < call.batch;
  }
  // of all rows of the batch
  __device__ __forceinline__ int64_t place(int row) const { return first_image * call.tokens + row; }

  const LevitExpertAttention& call;
  const AnyPlan& plan;
  float *patches, *tokens, *heads, *scores, *rest;
  int64_t first_image;

 private:
  __device__ __forceinline__ Pass& pass() { return static_cast<Pass&>(*this); }
  __device__ __forceinline__ int inputs(const Slab& slab) const { return slab.matrix ? call.width : call.pixels; }
  __device__ __forceinline__ int outputs(const Slab& slab) const { return slab.matrix ? call.depth : call.width; }
  // of the matrix among queries, keys, values, head by head, as the tensors have them
  __device__ __forceinline__ int part(const Slab& slab) const {
    return (slab.matrix - 1) % 3 * call.heads + (slab.matrix - 1) / 3;
  }

  __device__ __forceinline__ Slab after(Slab slab, int end) const {
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
      const T* from = static_cast<const T*>(call.patches);
      if (exists(row)) from += place(row) * call.pixels;
      for (int c = lane; c < call.pixels; c += 32) {
        patches[row * plan.patch_stride + c] = exists(row) ? gpu::to_float(from[c]) : 0.0f;
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
    const T* weights = static_cast<const T*>(call.w_qkv) + part(slab) * call.depth;
    weights += static_cast<int64_t>(slab.expert) * call.width * 3 * features;
    return {weights, 3 * features, call.width, call.depth, chunk};
  }

  __device__ __forceinline__ void finish_columns(const Slab& slab, const float (&sums)[kSide][kSide]) {
    const int row = first_row(), column = slab.column + first_column();
    const T* bias = slab.matrix ? static_cast<const T*>(call.b_qkv) + part(slab) * call.depth
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
        if (!slab.matrix) pass().keep_token(slab.expert, row + i, column + j, sum);
      }
    }
  }

  T* slabs;
  int* used;
};

}  // namespace levit
