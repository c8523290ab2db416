// Products of activations in shared memory with weights that stream past in slabs, without tensor cores.
#pragma once

#include <cstdint>

#include "copies.h"
#include "gpu.h"
#include "vectors.h"

namespace levit {

// A thread computes a square of 4 x 4, 16 threads a strip of kSlabColumns columns.
constexpr int kSlabRows = 32, kSlabColumns = 64, kSlab = kSlabRows * kSlabColumns, kSide = 4;

// Weights [inputs, outputs] whose rows lie `stride` apart; chunk: see gpu::chunk_of
template <class T>
struct Matrix {
  const T* data;
  int stride, inputs, outputs, chunk;
};

// Starts the copies of the slab whose corner is at (row, column); zeros beyond the matrix.
template <class T>
__device__ __forceinline__ void fill_slab(const Matrix<T>& of, int row, int column, T* slab) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, width = of.outputs - column, height = of.inputs - row;
  const T* from = of.data + static_cast<int64_t>(row) * of.stride + column;
  for (int c = lane * of.chunk; c < kSlabColumns; c += 32 * of.chunk) {
    for (int r = threadIdx.x / 32; r < kSlabRows; r += warps) {
      const bool copied = c < width && r < height;
      const T* source = from + (copied ? static_cast<int64_t>(r) * of.stride + c : 0);
      gpu::copy_chunk(slab + r * kSlabColumns + c, source, copied, of.chunk);
    }
  }
}

// The corner of a thread's square.
__device__ __forceinline__ int first_row() { return threadIdx.x / 16 * kSide; }
__device__ __forceinline__ int first_column() { return threadIdx.x % 16 * kSide; }

__device__ __forceinline__ void clear(float (&sums)[kSide][kSide]) {
#pragma unroll
  for (int i = 0; i < kSide * kSide; ++i) sums[i / kSide][i % kSide] = 0;
}

// sums += x [rows, count] slab [count, columns]
template <class T, class X>
__device__ __forceinline__ void add_slab(const X* x, int stride, int count, const T* slab,
                                         float (&sums)[kSide][kSide]) {
  x += first_row() * stride;
  slab += first_column();
  for (int k = 0; k < count; ++k) {
    const auto side = gpu::load<kSide>(slab + k * kSlabColumns);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const float input = gpu::to_float(x[i * stride + k]);
#pragma unroll
      for (int j = 0; j < kSide; ++j) sums[i][j] += input * gpu::to_float(side.numbers[j]);
    }
  }
}

}  // namespace levit
