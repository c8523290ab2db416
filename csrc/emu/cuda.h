// CUDA's own names, for kernels that g++ compiles. Only gpu.h includes this.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::levit::emu::thread_index())
#define blockIdx (::levit::emu::block_index())
#define blockDim (::levit::emu::block_size())
#define gridDim (::levit::emu::grid_size())
using dim3 = levit::emu::Size3;
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline void __syncthreads(LEVIT_CALLER) { levit::emu::sync_threads({file, line}); }
inline void __syncwarp(uint32_t mask = ~0u, LEVIT_CALLER) { levit::emu::sync_warp(mask, {file, line}); }

namespace levit::emu {

template <class T>
T exchange_value(uint32_t mask, T value, int source, const Site& site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = exchange(mask, word, source, site);
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

inline int lane() { return static_cast<int>(thread_index().x % 32); }

}  // namespace levit::emu

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other, LEVIT_CALLER) {
  return levit::emu::exchange_value(mask, value, levit::emu::lane() ^ other, {file, line});
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, int distance, LEVIT_CALLER) {
  const int source = levit::emu::lane() + distance;
  return levit::emu::exchange_value(mask, value, source < 32 ? source : levit::emu::lane(), {file, line});
}
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, LEVIT_CALLER) {
  return levit::emu::exchange_value(mask, value, source & 31, {file, line});
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline uint32_t __ballot_sync(uint32_t mask, int vote, LEVIT_CALLER) {
  return levit::emu::ballot(mask, vote != 0, {file, line});
}

template <class T>
__attribute__((no_sanitize("thread"))) T atomicAdd(T* address, std::type_identity_t<T> value, LEVIT_CALLER) {
  levit::emu::atomic_access(address, sizeof(T), {file, line});
  const T before = *address;
  *address = before + value;
  return before;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}
