// The steps of attention that one warp does on tensor cores for one head of one image of at most 16 tokens. A lane
// holds of a tile [16, 8] the columns 2 (lane % 4) and the next of the rows lane / 4 and lane / 4 + 8.
#pragma once

#include <cmath>
#include <cstdint>

#include "gpu.h"

namespace levit {

// sums [16, 8 kColumns] = rows [16, 16 kSteps] weights [16 kSteps, 8 kColumns]
template <class T, int kSteps, int kColumns>
__device__ __forceinline__ void project(const uint32_t (&rows)[kSteps][4], const T* weights, int stride,
                                        float (&sums)[2][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const T* at = weights + (step * 16 + lane % 16) * stride;
    if constexpr (kColumns == 2) {
      uint32_t b[4];
      gpu::load_transposed(b, at + lane / 16 * 8);
      gpu::multiply<T>(sums[0], rows[step], b[0], b[1]);
      gpu::multiply<T>(sums[1], rows[step], b[2], b[3]);
    } else {
      uint32_t b[2];
      gpu::load_transposed(b, at);
      gpu::multiply<T>(sums[0], rows[step], b[0], b[1]);
    }
  }
}

// The bias of the columns that a lane holds, in all four elements of each tile; beyond `length` there is none.
template <class T>
__device__ __forceinline__ void start_from_bias(const T* bias, int column, int length, float (&sums)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = column + tile * 8 + threadIdx.x % 4 * 2 + i;
      sums[tile][i] = sums[tile][i + 2] = at < length ? gpu::to_float(bias[at]) : 0.0f;
    }
  }
}

// kColumns tiles of the queries and of the keys, and what they add to the scores [queries, keys].
template <class T, int kSteps, int kColumns>
__device__ __forceinline__ void add_scores(const uint32_t (&tokens)[kSteps][4], const T* weights, int stride,
                                           const T* query_bias, const T* key_bias, int column, int depth,
                                           float (&scores)[2][4]) {
  float sums[2][4];
  uint32_t queries[4] = {}, keys[4] = {};
  start_from_bias(query_bias, column, depth, sums);
  project<T, kSteps, kColumns>(tokens, weights, stride, sums);
#pragma unroll
  for (int tile = 0; tile < kColumns; ++tile) {
    queries[2 * tile] = gpu::pack<T>(sums[tile][0], sums[tile][1]);
    queries[2 * tile + 1] = gpu::pack<T>(sums[tile][2], sums[tile][3]);
  }
  start_from_bias(key_bias, column, depth, sums);
  project<T, kSteps, kColumns>(tokens, weights + 16, stride, sums);
#pragma unroll
  for (int tile = 0; tile < kColumns; ++tile) {
    keys[2 * tile] = gpu::pack<T>(sums[tile][0], sums[tile][1]);
    keys[2 * tile + 1] = gpu::pack<T>(sums[tile][2], sums[tile][3]);
  }
  // A lane holds of a product just what the right operand of the next wants of its transpose.
  gpu::multiply<T>(scores[0], queries, keys[0], keys[2]);
  gpu::multiply<T>(scores[1], queries, keys[1], keys[3]);
}

// scores [16 queries, 16 keys] -> the powers of their softmax as a left operand, and for the two queries of a lane
// gate / their sum in `share`: what the powers weigh is normalised in float.
template <class T>
__device__ __forceinline__ void softmax(const float (&scores)[2][4], int tokens, int depth, float gate,
                                        uint32_t (&powers)[4], float (&share)[2]) {
  const float scale = 1.44269504f * rsqrtf(static_cast<float>(depth));
  float power[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = -INFINITY, total = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      const float score = key < tokens ? scores[i / 2][half * 2 + i % 2] * scale : -INFINITY;
      power[i / 2][half * 2 + i % 2] = score;
      most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = power[i / 2][half * 2 + i % 2];
      value = exp2f(value - most);
      total += value;
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    share[half] = gate / total;
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    powers[2 * tile] = gpu::pack<T>(power[tile][0], power[tile][1]);
    powers[2 * tile + 1] = gpu::pack<T>(power[tile][2], power[tile][3]);
  }
}

// out [16, 8 kColumns] += share * (powers values), the values being projected here
template <class T, int kSteps, int kColumns>
__device__ __forceinline__ void add_values(const uint32_t (&tokens)[kSteps][4], const T* weights, int stride,
                                           const T* bias, int column, int depth, const uint32_t (&powers)[4],
                                           const float (&share)[2], float (*out)[4]) {
  float sums[2][4];
  start_from_bias(bias, column, depth, sums);
  project<T, kSteps, kColumns>(tokens, weights, stride, sums);
#pragma unroll
  for (int tile = 0; tile < kColumns; ++tile) {
    const uint32_t first = gpu::transpose(gpu::pack<T>(sums[tile][0], sums[tile][1]));
    const uint32_t second = gpu::transpose(gpu::pack<T>(sums[tile][2], sums[tile][3]));
    float product[4] = {};
    gpu::multiply<T>(product, powers, first, second);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[tile][i] += share[i / 2] * product[i];
  }
}

}  // namespace levit
