// Tiles of numbers in scratch memory: their products, turned around and copied, in whole vectors of columns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "multiversion.h"
#include "products.h"

namespace levit {

template <class T, int kWidth, int kChannels>
struct Tiles : private Products<T, kWidth> {
  using Sum = typename Words<T, kWidth>::Sum;
  using V = Lanes<Sum, kWidth>;

  // out [channels, columns] (+)= w [channels, inputs] x [inputs, columns], in whole vectors of columns
  template <int kVectors>
  static LEVIT_INLINE void multiply_vectors(const Product<T>& of, int64_t channels, bool add, Sum* out,
                                            int64_t stride) {
    Tiles::template all_channels<kChannels, kVectors>(
        channels, of, nullptr,
        [&]<int C>(int64_t c, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              sums[n][v] = add ? load<kWidth>(out + (c + n) * stride + v * kWidth) : V{};
            }
          }
        },
        [&]<int C>(int64_t c, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) store(out + (c + n) * stride + v * kWidth, sums[n][v]);
          }
        });
  }

  static LEVIT_INLINE void multiply(Product<T> of, int64_t channels, int64_t columns, bool add, Sum* out,
                                    int64_t stride) {
    for (; columns > kWidth; columns -= 2 * kWidth, of.x += 2 * kWidth, out += 2 * kWidth) {
      multiply_vectors<2>(of, channels, add, out, stride);
    }
    if (columns > 0) multiply_vectors<1>(of, channels, add, out, stride);
  }

  // to [columns, rows] = from [rows, columns]
  static LEVIT_INLINE void turn(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to,
                                int64_t to_stride) {
    if (rows < kWidth || columns < kWidth) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
      }
      return;
    }
    for (int64_t next_row = 0; next_row < rows; next_row += kWidth) {
      for (int64_t next = 0; next < columns; next += kWidth) {  // the last squares may overlap those before
        const int64_t r = std::min(next_row, rows - kWidth), c = std::min(next, columns - kWidth);
        const T* row = from + r * from_stride + c;
        T* turned = to + c * to_stride + r;
        V square[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i, row += from_stride) square[i] = load<kWidth>(row);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i, turned += to_stride) store(turned, square[i]);
      }
    }
  }

  // to = from, rows of `count` numbers
  static LEVIT_INLINE void copy(const T* from, int64_t from_stride, int64_t rows, int64_t count, T* to,
                                int64_t to_stride) {
    for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
      int64_t i = 0;
      for (; i + kWidth <= count; i += kWidth) store(to + i, load<kWidth>(from + i));
      for (; i < count; ++i) to[i] = from[i];
    }
  }
};

}  // namespace levit
