// Rows of global memory into shared memory, asynchronously where their alignment allows it.
#pragma once

#include <cstdint>

#include "gpu.h"

namespace levit::gpu {

// `chunk` numbers (of 16, 8 or 4 bytes together, or a single one), or zeros
template <class T>
__device__ __forceinline__ void copy_chunk(T* to, const T* from, bool valid, int chunk) {
  const int bytes = chunk * static_cast<int>(sizeof(T));
  if (bytes == 16) {
    copy_async<16>(to, from, valid);
  } else if (bytes == 8) {
    copy_async<8>(to, from, valid);
  } else if (bytes == 4) {
    copy_async<4>(to, from, valid);
  } else {
    *to = valid ? *from : from_float<T>(0.0f);
  }
}

// The longest chunk in which rows of `length` numbers, dense from `data` on, can be copied
template <class T>
int chunk_of(const void* data, int64_t length) {
  for (int bytes = 16; bytes >= 4; bytes /= 2) {
    const int chunk = bytes / static_cast<int>(sizeof(T));
    if (chunk && length % chunk == 0 && reinterpret_cast<uintptr_t>(data) % bytes == 0) return chunk;
  }
  return 1;
}

}  // namespace levit::gpu
