// dkf_fuse reads the store's rows where they lie: once for the sum, once for the gradient of the gates. Memory is the
// bound, so every thread keeps several loads of neighbouring numbers in flight.
#pragma once

#include <cstdint>

#include "dkf_fuse.h"
#include "gates.cuh"
#include "gpu.h"
#include "vectors.h"

namespace levit {

constexpr int kFuseThreads = 256, kExpertsAtOnce = 4, kGateWarps = 4;

__device__ __forceinline__ int64_t stored_row(const LevitDkfFuse& call, int64_t image) {
  const int64_t row = call.index ? call.index[image] : image;
  gpu::require(row >= 0 && row < call.rows);
  return row;
}

// A block: kFuseThreads * kCount numbers of one image. Neighbours of a vector belong to one head.
template <class T, class Out, int kCount>
__global__ void __launch_bounds__(kFuseThreads) dkf_fuse(const LevitDkfFuse call, int parts) {
  const int64_t image = blockIdx.x / parts;
  const int at = (blockIdx.x % parts * kFuseThreads + threadIdx.x) * kCount, numbers = call.tokens * call.width;
  if (at >= numbers) return;
  const int head = at % call.width / (call.width / call.heads);
  const T* stored = static_cast<const T*>(call.features) + stored_row(call, image) * call.per_row + at;
  float sums[kCount] = {};
  for (int first = 0; first < call.experts; first += kExpertsAtOnce) {
    float gates[kExpertsAtOnce];
    gpu::Vector<T, kCount> vectors[kExpertsAtOnce];
#pragma unroll
    for (int i = 0; i < kExpertsAtOnce; ++i) {
      const int expert = first + i;
      gates[i] = expert < call.experts ? gate_of(call.gates, image, expert, head) : 0.0f;
      if (gates[i] != 0.0f) vectors[i] = gpu::load<kCount>(stored + expert * call.per_expert);
    }
#pragma unroll
    for (int i = 0; i < kExpertsAtOnce; ++i) {
      if (gates[i] == 0.0f) continue;  // whatever is stored
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] += gates[i] * gpu::to_float(vectors[i].numbers[j]);
    }
  }
  gpu::store(static_cast<Out*>(call.out) + image * numbers + at, sums);
}

// A warp: <grad, features> of one image, expert and head.
template <class T, class Grad, int kCount>
__global__ void __launch_bounds__(32 * kGateWarps) dkf_fuse_by_gates(const LevitDkfFuse call, int parts) {
  const int64_t image = blockIdx.x / parts;
  const int which = blockIdx.x % parts * kGateWarps + threadIdx.x / 32;
  if (which >= call.experts * call.heads) return;
  const int expert = which / call.heads, head = which % call.heads, depth = call.width / call.heads;
  const int of_token = depth / kCount, vectors = call.tokens * of_token;
  const T* stored = static_cast<const T*>(call.features);
  stored += stored_row(call, image) * call.per_row + expert * call.per_expert + head * depth;
  const Grad* grad = static_cast<const Grad*>(call.grad) + image * call.tokens * call.width + head * depth;
  float sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < vectors; i += 32) {
    const int at = i / of_token * call.width + i % of_token * kCount;
    const auto feature = gpu::load<kCount>(stored + at);
    const auto upstream = gpu::load<kCount>(grad + at);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += gpu::to_float(feature.numbers[j]) * gpu::to_float(upstream.numbers[j]);
  }
#pragma unroll
  for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (threadIdx.x % 32 == 0) call.by_gates[image * call.experts * call.heads + which] = sum;
}

// A block: kFuseThreads * kCount numbers of one stored row and expert. Every image that reads the row adds to them, in
// the order of the batch: no atomics, the same sum every time.
template <class T, class Grad, int kCount>
__global__ void __launch_bounds__(kFuseThreads) dkf_fuse_by_features(const LevitDkfFuse call, int parts) {
  const int64_t row = blockIdx.x / parts;
  const int at = (blockIdx.x % parts * kFuseThreads + threadIdx.x) * kCount, numbers = call.tokens * call.width;
  if (at >= numbers) return;
  const int expert = blockIdx.y, head = at % call.width / (call.width / call.heads);
  float sums[kCount] = {};
  for (int64_t image = call.index ? 0 : row; image < (call.index ? call.batch : row + 1); ++image) {
    if (stored_row(call, image) != row) continue;
    const float gate = gate_of(call.gates, image, expert, head);
    const auto upstream = gpu::load<kCount>(static_cast<const Grad*>(call.grad) + image * numbers + at);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] += gate * gpu::to_float(upstream.numbers[j]);
  }
  gpu::store(static_cast<T*>(call.by_features) + (row * call.experts + expert) * numbers + at, sums);
}

}  // namespace levit
