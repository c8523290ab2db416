// Several consecutive numbers in one access.
#pragma once

#include "gpu.h"

namespace levit::gpu {

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T numbers[kCount];
};

template <int kCount, class T>
__device__ __forceinline__ Vector<T, kCount> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

template <class T, int kCount>
__device__ __forceinline__ void store(T* to, const float (&numbers)[kCount]) {
  Vector<T, kCount> vector;
#pragma unroll
  for (int i = 0; i < kCount; ++i) vector.numbers[i] = from_float<T>(numbers[i]);
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

}  // namespace levit::gpu
