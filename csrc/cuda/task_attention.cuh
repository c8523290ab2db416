// task_attention between the products that torch computes: scores of some queries with all patches of an image, their
// softmax with each token's own score, and the sum of values. A block holds the scores of its queries; keys and values
// stream past in tiles, the next one under way while this one is used.
//
// No tensor cores: with the CIFAR preset's 50 tokens attention is an eighth of a call's operations (4 T D of a patch,
// against 4 D D for its keys and values), with few tokens less. In half precision that eighth takes about as long as
// the products on tensor cores do; in float32 it does not matter.
#pragma once

#include <cmath>
#include <cstdint>

#include "copies.h"
#include "gpu.h"
#include "slabs.cuh"
#include "sums.cuh"
#include "task_attention.h"
#include "vectors.h"

namespace levit {

constexpr int kQueryThreads = 4;  // 16 that multiply 4 queries at a time; and 4 that share one
constexpr int kMaxQueries = 64;   // of a block
constexpr int kKeys = 64, kKeyDepth = 32;  // of a tile of keys; 16 threads have 4 each

// Lengths in numbers.
struct TaskPlan {
  int queries, parts;  // of a block; blocks for the queries of a group
  int chunk;           // in which queries, keys, values and grad can be copied
  int tile_stride;     // an odd multiple of 16 bytes: vectors of different rows lie in different banks
  int score_stride;
  int tile_bytes, shared_bytes;
};

template <class T>
class TaskBlock {
 public:
  __device__ __forceinline__ TaskBlock(const LevitTaskAttention& of, const TaskPlan& p, unsigned char* memory)
      : call(of), plan(p), image(blockIdx.x / p.parts), group(blockIdx.y) {
    tiles = reinterpret_cast<T*>(memory);
    attention = reinterpret_cast<float*>(memory + plan.tile_bytes);
    of_group = call.heads / call.groups * call.tokens;
    first_query = blockIdx.x % plan.parts * plan.queries;
  }

  // Whether a query of the block is one of the group's, and which of all heads' it is
  __device__ __forceinline__ bool exists(int query) const { return first_query + query < of_group; }
  __device__ __forceinline__ int place(int query) const { return group * of_group + first_query + query; }
  __device__ __forceinline__ const T* query_at(int query) const {
    return static_cast<const T*>(call.query) + static_cast<int64_t>(place(query)) * call.depth;
  }
  __device__ __forceinline__ const T* own_value(int query) const {
    const int head = place(query) / call.tokens, token = place(query) % call.tokens;
    return static_cast<const T*>(call.own_values) + head * call.own_per_head + int64_t{token} * call.depth;
  }
  __device__ __forceinline__ int64_t offset(const LevitByHead& by, int query) const {
    const int head = place(query) / call.tokens, token = place(query) % call.tokens;
    return head * by.per_head + image * by.per_image + token * by.per_token;
  }
  __device__ __forceinline__ const T* of_image(const void* keys_or_values) const {
    const int64_t first = (image * call.patches * call.groups + group) * call.depth;
    return static_cast<const T*>(keys_or_values) + first;
  }

  // to [queries, patches] = x [queries, C] y [patches, C]^T; row(query) is where a row of x begins.
  template <class Row>
  __device__ __forceinline__ void multiply(const Row& row, const void* y, float* to) {
    __syncthreads();  // everybody has left the tiles of whatever was computed before
    const int steps = (call.depth + kKeyDepth - 1) / kKeyDepth, all = (call.patches + kKeys - 1) / kKeys * steps;
    fill(row, of_image(y), 0, 0, tiles);
    gpu::commit_copies();
    float sums[kSide][kSide];
    for (int i = 0; i < all; ++i) {
      gpu::wait_for_copies<0>();
      __syncthreads();  // this tile has come, the other one is free
      const int next = i + 1, key = i / steps * kKeys;
      if (next < all) fill(row, of_image(y), next / steps * kKeys, next % steps * kKeyDepth, tile(next));
      gpu::commit_copies();
      if (i % steps == 0) clear(sums);
      add_tile(tile(i), sums);
      if (next % steps) continue;
#pragma unroll
      for (int a = 0; a < kSide; ++a) {
#pragma unroll
        for (int b = 0; b < kSide; ++b) {
          const int column = key + threadIdx.x % 16 + 16 * b;
          if (column < call.patches) to[(first_row() + a) * plan.score_stride + column] = sums[a][b];
        }
      }
    }
    __syncwarp();  // the row of a query is complete: all who wrote it are of the warp that reads it
  }

  // Scores -> attention, for whoever reads it behind a barrier; returns that of a thread's query to itself.
  __device__ __forceinline__ float softmax() const {
    float* const powers = attention + query() * plan.score_stride;
    float own = exists(query()) ? call.own_scores[place(query())] : 0.0f, most = own, total = 0;
    for (int key = part(); key < call.patches; key += kQueryThreads) {
      const float score = powers[key] * call.scale;
      powers[key] = score;
      most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    own = expf(own - most);
    for (int key = part(); key < call.patches; key += kQueryThreads) {
      const float power = expf(powers[key] - most);
      powers[key] = power;
      total += power;
    }
    total = own + sum_of_lanes<kQueryThreads>(total);
    for (int key = part(); key < call.patches; key += kQueryThreads) powers[key] /= total;
    return own / total;
  }

  // out = attention values + own * own values
  __device__ __forceinline__ void mix(float own) {
    float shares[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      shares[i] = __shfl_sync(~0u, own, threadIdx.x % 32 / 16 * 16 + kQueryThreads * i);
    }
    __syncthreads();  // everybody has left the tiles of the keys, and the attention is complete
    const int stride = call.groups * call.depth;
    const Matrix<T> values = {of_image(call.values), stride, call.patches, call.depth, plan.chunk};
    const int steps = (call.patches + kSlabRows - 1) / kSlabRows;
    const int all = (call.depth + kSlabColumns - 1) / kSlabColumns * steps;
    fill_slab(values, 0, 0, tiles);
    gpu::commit_copies();
    float sums[kSide][kSide];
    for (int i = 0; i < all; ++i) {
      gpu::wait_for_copies<0>();
      __syncthreads();  // this slab has come, the other one is free
      const int next = i + 1, key = i % steps * kSlabRows;
      if (next < all) {
        fill_slab(values, next % steps * kSlabRows, next / steps * kSlabColumns, tiles + next % 2 * kSlab);
      }
      gpu::commit_copies();
      if (key == 0) clear(sums);
      add_slab(attention + key, plan.score_stride, min(kSlabRows, call.patches - key), tiles + i % 2 * kSlab, sums);
      if (next % steps == 0) store(i / steps * kSlabColumns + first_column(), sums, shares);
    }
  }

  __device__ __forceinline__ static int query() { return threadIdx.x / kQueryThreads; }
  __device__ __forceinline__ static int part() { return threadIdx.x % kQueryThreads; }

  const LevitTaskAttention& call;
  const TaskPlan& plan;
  const int64_t image;
  const int group;
  float* attention;  // [queries, patches], at first the scores

 private:
  __device__ __forceinline__ T* tile(int i) const {
    return tiles + i % 2 * (plan.queries + kKeys) * plan.tile_stride;
  }

  // Rows of x and below them rows of y, kKeyDepth columns of both; zeros where there is nothing.
  template <class Row>
  __device__ __forceinline__ void fill(const Row& row, const T* y, int key, int column, T* to) const {
    const int of_row = kKeyDepth / plan.chunk;
    for (int i = threadIdx.x; i < (plan.queries + kKeys) * of_row; i += blockDim.x) {
      const int r = i / of_row, c = i % of_row * plan.chunk, patch = key + r - plan.queries;
      const bool of_query = r < plan.queries;
      const bool copied = column + c < call.depth && (of_query ? exists(r) : patch < call.patches);
      const T* from = y;
      if (copied) from = (of_query ? row(r) : y + int64_t{patch} * call.groups * call.depth) + column + c;
      gpu::copy_chunk(to + r * plan.tile_stride + c, from, copied, plan.chunk);
    }
  }

  __device__ __forceinline__ void add_tile(const T* now, float (&sums)[kSide][kSide]) const {
    constexpr int kCount = 16 / sizeof(T);
    const T* const x = now + first_row() * plan.tile_stride;
    const T* const y = now + (plan.queries + threadIdx.x % 16) * plan.tile_stride;
#pragma unroll
    for (int k = 0; k < kKeyDepth; k += kCount) {
      gpu::Vector<T, kCount> a[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) a[i] = gpu::load<kCount>(x + i * plan.tile_stride + k);
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const auto b = gpu::load<kCount>(y + 16 * j * plan.tile_stride + k);
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int n = 0; n < kCount; ++n) sums[i][j] += gpu::to_float(a[i].numbers[n]) * gpu::to_float(b.numbers[n]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(int column, const float (&sums)[kSide][kSide], const float (&shares)[kSide]) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int query = first_row() + i;
      if (!exists(query)) break;
      T* const to = static_cast<T*>(call.out) + offset(call.out_by, query);
      const T* const own = own_value(query);
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        if (column + j >= call.depth) break;
        to[column + j] = gpu::from_float<T>(sums[i][j] + shares[i] * gpu::to_float(own[column + j]));
      }
    }
  }

  T* tiles;
  int of_group, first_query;
};

template <class T>
__global__ void __launch_bounds__(kMaxQueries* kQueryThreads)
    task_attention(const __grid_constant__ LevitTaskAttention call, const __grid_constant__ TaskPlan plan) {
  LEVIT_SHARED(memory);
  TaskBlock<T> block(call, plan, memory);
  block.multiply([&](int query) { return block.query_at(query); }, call.keys, block.attention);
  block.mix(block.softmax());
}

template <class T>
__global__ void __launch_bounds__(kMaxQueries* kQueryThreads)
    task_attention_backward(const __grid_constant__ LevitTaskAttention call, const __grid_constant__ TaskPlan plan) {
  LEVIT_SHARED(memory);
  TaskBlock<T> block(call, plan, memory);
  float* const by_attention = block.attention + plan.queries * plan.score_stride;
  const T* const grad = static_cast<const T*>(call.grad);
  const auto grad_at = [&](int query) { return grad + block.offset(call.grad_by, query); };
  block.multiply([&](int query) { return block.query_at(query); }, call.keys, block.attention);
  const float own = block.softmax();
  block.multiply(grad_at, call.values, by_attention);

  const int query = block.query(), at = query * plan.score_stride;
  float by_own = 0, expected = 0;  // what the output times its gradient adds up to
  if (block.exists(query)) {
    const T *const of_query = grad_at(query), *const value = block.own_value(query);
    for (int c = block.part(); c < call.depth; c += kQueryThreads) {
      by_own += gpu::to_float(of_query[c]) * gpu::to_float(value[c]);
    }
  }
  by_own = sum_of_lanes<kQueryThreads>(by_own);
  for (int key = block.part(); key < call.patches; key += kQueryThreads) {
    expected += block.attention[at + key] * by_attention[at + key];
  }
  expected = own * by_own + sum_of_lanes<kQueryThreads>(expected);
  if (block.part() == 0 && block.exists(query)) {
    const int64_t to = block.place(query) * call.batch + block.image;
    call.own_attention[to] = own;
    call.by_own_score[to] = own * (by_own - expected) * call.scale;
  }

  // A warp writes the rows of its queries, its lanes along the patches.
  const int64_t queries = int64_t{call.heads} * call.tokens;
  constexpr int kOfWarp = 32 / kQueryThreads;
  for (int i = 0; i < kOfWarp; ++i) {
    const int of_warp = threadIdx.x / 32 * kOfWarp + i;
    const float sum = __shfl_sync(~0u, expected, i * kQueryThreads);
    if (!block.exists(of_warp)) continue;
    const int64_t place = block.place(of_warp);
    T* const shares = static_cast<T*>(call.attention) + (block.image * queries + place) * call.patches;
    T* const by_scores = static_cast<T*>(call.by_scores) + (place * call.batch + block.image) * call.patches;
    for (int key = threadIdx.x % 32; key < call.patches; key += 32) {
      const float share = block.attention[of_warp * plan.score_stride + key];
      const float by_share = by_attention[of_warp * plan.score_stride + key];
      shares[key] = gpu::from_float<T>(share);
      by_scores[key] = gpu::from_float<T>(share * (by_share - sum) * call.scale);
    }
  }
}

}  // namespace levit
