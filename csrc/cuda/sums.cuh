// Sums across threads, always in the same order: the results do not depend on the schedule.
#pragma once

#include <cstdint>

#include "gpu.h"

namespace levit {

// Over each kLanes neighbouring lanes; all of them get it.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int other = kLanes / 2; other; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  return value;
}

// out [rows] = the mean over `samples` of what was summed up in partial [rows, count]; a warp per row
template <class T>
__global__ void mean_of_partials(const T* partial, int64_t count, int64_t samples, T* out) {
  T sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += 32) sum += partial[blockIdx.x * count + i];
  sum = sum_of_lanes<32>(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum / static_cast<T>(samples);
}

}  // namespace levit
