// C = A B for matrices in global memory of any strides, float sums, the sum over k always in the same order. It serves
// the gradients of weights, which are sums over all tokens, and of what the weights were multiplied with.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "vectors.h"

namespace levit {

constexpr int kProductTile = 64, kProductDepth = 16, kProductThreads = 256, kProductSide = 4;
constexpr int kProductStride = kProductTile + 4;  // whole vectors, and columns in different banks

// Element (row, column) of the matrix of a batch and of a term; the terms are added up.
template <class T>
struct Operand {
  const T* data;
  int64_t by_batch, by_term, by_row, by_column;

  __device__ __forceinline__ const T* at(int64_t batch, int64_t term, int64_t row, int64_t column) const {
    return data + batch * by_batch + term * by_term + row * by_row + column * by_column;
  }
};

template <class A, class B, class C>
struct MatrixProduct {
  Operand<A> a;        // [rows, depth]
  Operand<B> b;        // [depth, columns]
  C* out;              // [batch, rows, columns], dense
  int64_t rows, depth;
  int columns, terms;
  // Where the tokens, of the shape of out, are not positive, the product is multiplied by the slope; or null.
  const float* tokens;
  float slope;
  C* column_sums;      // [batch, columns], those of b over its rows; or null
};

// A tile of kProductDepth x kProductTile numbers of an operand, the inner index along k, with zeros beyond it. Threads
// lie along whatever is consecutive in memory.
template <class T>
__device__ __forceinline__ void load_tile(const T* from, int64_t by_inner, int64_t by_outer, int64_t inner,
                                          int64_t outer, float* tile) {
  for (int i = threadIdx.x; i < kProductDepth * kProductTile; i += kProductThreads) {
    const bool along = by_inner == 1;
    const int k = along ? i % kProductDepth : i / kProductTile, o = along ? i / kProductDepth : i % kProductTile;
    const bool exists = k < inner && o < outer;
    tile[k * kProductStride + o] = exists ? gpu::to_float(from[k * by_inner + o * by_outer]) : 0.0f;
  }
}

template <class A, class B, class C>
__global__ void __launch_bounds__(kProductThreads)
    matrix_product(const __grid_constant__ MatrixProduct<A, B, C> of, int column_tiles) {
  LEVIT_SHARED(memory);
  constexpr int kTile = kProductDepth * kProductStride, kSide = kProductSide;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / column_tiles) * kProductTile;
  const int first_column = blockIdx.x % column_tiles * kProductTile, batch = blockIdx.y;
  const int row = threadIdx.x / 16 * kSide, column = threadIdx.x % 16 * kSide;
  const bool sums_columns = of.column_sums && first_row == 0 && row == 0;
  float sums[kSide][kSide] = {}, column_sums[kSide] = {};
  int buffer = 0;
  for (int term = 0; term < of.terms; ++term) {
    for (int64_t k = 0; k < of.depth; k += kProductDepth) {
      float* const left = reinterpret_cast<float*>(memory) + 2 * buffer * kTile;
      float* const right = left + kTile;
      const A* a = of.a.at(batch, term, first_row, k);
      const B* b = of.b.at(batch, term, k, first_column);
      load_tile(a, of.a.by_column, of.a.by_row, of.depth - k, of.rows - first_row, left);
      load_tile(b, of.b.by_row, of.b.by_column, of.depth - k, of.columns - first_column, right);
      __syncthreads();  // both tiles are complete; and everybody is done with those before the last
#pragma unroll
      for (int i = 0; i < kProductDepth; ++i) {
        const auto x = gpu::load<kSide>(left + i * kProductStride + row);
        const auto y = gpu::load<kSide>(right + i * kProductStride + column);
#pragma unroll
        for (int r = 0; r < kSide; ++r) {
#pragma unroll
          for (int c = 0; c < kSide; ++c) sums[r][c] += x.numbers[r] * y.numbers[c];
        }
        if (sums_columns) {
#pragma unroll
          for (int c = 0; c < kSide; ++c) column_sums[c] += y.numbers[c];
        }
      }
      buffer = 1 - buffer;
    }
  }
#pragma unroll
  for (int c = 0; c < kSide; ++c) {
    const int at_column = first_column + column + c;
    if (at_column >= of.columns) break;
    if (sums_columns) {
      of.column_sums[static_cast<int64_t>(batch) * of.columns + at_column] = gpu::from_float<C>(column_sums[c]);
    }
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      if (first_row + row + r >= of.rows) break;
      const int64_t at = (batch * of.rows + first_row + row + r) * of.columns + at_column;
      if (of.tokens && !(of.tokens[at] > 0)) sums[r][c] *= of.slope;
      of.out[at] = gpu::from_float<C>(sums[r][c]);
    }
  }
}

template <class A, class B, class C>
int multiply_matrices(const MatrixProduct<A, B, C>& of, int batch, void* stream) {
  const int64_t row_tiles = (of.rows + kProductTile - 1) / kProductTile;
  const int column_tiles = (of.columns + kProductTile - 1) / kProductTile;
  constexpr int kBytes = 4 * kProductDepth * kProductStride * static_cast<int>(sizeof(float));
  return LEVIT_LAUNCH((matrix_product<A, B, C>), dim3(static_cast<unsigned>(row_tiles * column_tiles), batch),
                      dim3(kProductThreads), kBytes, stream, of, column_tiles);
}

}  // namespace levit
