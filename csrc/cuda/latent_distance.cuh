// latent_distance: a warp per sample, its lanes along the code. No thread waits for another.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "latent_distance.h"
#include "sums.cuh"

namespace levit {

constexpr int kDistanceWarps = 8;
constexpr int kSamplesPerWarp = 8;
constexpr int kColumnsPerLane = 8;  // of the query's gradient, kept in registers

template <class T>
__device__ __forceinline__ float difference(const T* code, const T* query, int column) {
  return gpu::to_float(code[column]) - gpu::to_float(query[column]);
}

template <class T>
__device__ __forceinline__ float distance(const T* code, const T* query, int latent) {
  float sum = 0;
  for (int c = threadIdx.x % 32; c < latent; c += 32) {
    const float apart = difference(code, query, c);
    sum += apart * apart;
  }
  return sqrtf(sum_of_lanes<32>(sum));
}

// A warp: the sum of the distances of kSamplesPerWarp samples to one expert's codes.
template <class T>
__global__ void __launch_bounds__(32 * kDistanceWarps)
    latent_distance(const LevitLatentDistance call, int64_t partials, int parts) {
  const int expert = blockIdx.x / parts;
  const int64_t which = blockIdx.x % parts * static_cast<int64_t>(kDistanceWarps) + threadIdx.x / 32;
  if (which >= partials) return;
  const T* codes = static_cast<const T*>(call.codes) + expert * call.samples * call.latent;
  const T* query = static_cast<const T*>(call.query);
  float total = 0;
  for (int i = 0; i < kSamplesPerWarp; ++i) {
    const int64_t sample = which * kSamplesPerWarp + i;
    if (sample >= call.samples) break;
    total += distance(codes + sample * call.latent, query + sample * call.latent, call.latent);
  }
  if (threadIdx.x % 32 == 0) call.partial[expert * partials + which] = total;
}

// A warp: one sample. The gradient of a code is the unit vector from the query to it, weighted by grad / M, zero where
// they coincide; that of the query is minus their sum over the experts.
template <class T>
__global__ void __launch_bounds__(32 * kDistanceWarps) latent_distance_backward(const LevitLatentDistance call) {
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kDistanceWarps + threadIdx.x / 32;
  if (sample >= call.samples) return;
  const T* query = static_cast<const T*>(call.query) + sample * call.latent;
  for (int first = threadIdx.x % 32; first < (call.latent + 31) / 32 * 32; first += 32 * kColumnsPerLane) {
    float sums[kColumnsPerLane] = {};
    for (int expert = 0; expert < call.experts; ++expert) {
      const int64_t at = (expert * call.samples + sample) * call.latent;
      const T* code = static_cast<const T*>(call.codes) + at;
      const float apart = distance(code, query, call.latent);
      const float weight = call.grad[expert] / static_cast<float>(call.samples) / (apart == 0 ? 1.0f : apart);
#pragma unroll
      for (int i = 0; i < kColumnsPerLane; ++i) {
        const int column = first + 32 * i;
        if (column >= call.latent) break;
        const float direction = weight * difference(code, query, column);
        sums[i] -= direction;
        if (call.by_codes) static_cast<T*>(call.by_codes)[at + column] = gpu::from_float<T>(direction);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumnsPerLane; ++i) {
      const int column = first + 32 * i;
      if (!call.by_query || column >= call.latent) break;
      static_cast<T*>(call.by_query)[sample * call.latent + column] = gpu::from_float<T>(sums[i]);
    }
  }
}

}  // namespace levit
