// Dense layers for enough rows to be worth turning the weights around: into panels of two vectors of outputs, each one
// stream of reads. The rows of x are broadcast from where they lie, and y leaves in rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "multiversion.h"
#include "products.h"
#include "tiles.h"

namespace levit {

// [rows, columns] at any strides
template <class T>
struct Matrix {
  const T* data;
  int64_t by_row, by_column;
};

// The first `count` numbers of a vector, at most all.
template <class T, class V>
LEVIT_INLINE void store_part(T* to, const V& lanes, int64_t count) {
  if (count >= static_cast<int64_t>(sizeof(V) / sizeof(T))) {
    store(to, lanes);
  } else {
    std::memcpy(to, &lanes, count * sizeof(T));
  }
}

// Several rows at a time: kChannels, and for the rest fewer.
template <class T, int kWidth, int kChannels>
struct Rows : private Products<T, kWidth> {
  template <int kVectors, class Start, class Finish>
  static LEVIT_INLINE void each(int64_t count, const Product<T>& of, const Start& start, const Finish& finish) {
    int64_t row = 0;
    Rows::template blocks<kChannels, kVectors>(row, count, of, nullptr, start, finish);
    Rows::template blocks<4, kVectors>(row, count, of, nullptr, start, finish);
    Rows::template blocks<2, kVectors>(row, count, of, nullptr, start, finish);
    Rows::template blocks<1, kVectors>(row, count, of, nullptr, start, finish);
  }

  // out [rows, columns] = the product, of kVectors vectors the first `columns` numbers
  template <int kVectors, class Sum = typename Words<T, kWidth>::Sum>
  static LEVIT_INLINE void multiply(const Product<T>& of, int64_t rows, int64_t columns, Sum* out, int64_t stride) {
    using V = Lanes<Sum, kWidth>;
    each<kVectors>(rows, of, FromZero{}, [&]<int C>(int64_t row, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          store_part(out + (row + n) * stride + v * kWidth, sums[n][v], columns - v * kWidth);
        }
      }
    });
  }
};

template <class T, int kWidth, int kChannels>
struct Panels {
  using V = Lanes<T, kWidth>;

  // Of a weight [outputs, inputs]: panels of [inputs, 2 kWidth] or, the last, [inputs, kWidth] outputs; what pads is 0.
  static LEVIT_INLINE void pack(const Matrix<T>& weight, int64_t outputs, int64_t inputs, T* panels) {
    for (int64_t o = 0; o < outputs; o += 2 * kWidth, panels += inputs * 2 * kWidth) {
      const int64_t count = std::min<int64_t>(outputs - o, 2 * kWidth), lanes = round_up(count, kWidth);
      const T* from = weight.data + o * weight.by_row;
      if (count < lanes) std::fill(panels, panels + inputs * lanes, T(0));
      if (weight.by_column == 1) {
        Tiles<T, kWidth, kChannels>::turn(from, weight.by_row, count, inputs, panels, lanes);
        continue;
      }
      for (int64_t i = 0; i < inputs; ++i) {
        for (int64_t n = 0; n < count; ++n) panels[i * lanes + n] = from[n * weight.by_row + i * weight.by_column];
      }
    }
  }

  // y [rows, outputs] = bias + x [rows, inputs] panels; bias is in whole vectors
  static LEVIT_INLINE void multiply(const Matrix<T>& x, int64_t rows, const T* panels, int64_t outputs, int64_t inputs,
                                    const T* bias, T* y, int64_t by_row) {
    for (int64_t o = 0; o < outputs; o += 2 * kWidth, panels += inputs * 2 * kWidth) {
      if (outputs - o > kWidth) {
        panel<2>(x, rows, panels, outputs - o, inputs, bias + o, y + o, by_row);
      } else {
        panel<1>(x, rows, panels, outputs - o, inputs, bias + o, y + o, by_row);
      }
    }
  }

 private:
  template <int kVectors>
  static LEVIT_INLINE void panel(const Matrix<T>& x, int64_t rows, const T* weights, int64_t outputs, int64_t inputs,
                                 const T* bias, T* y, int64_t by_row) {
    Rows<T, kWidth, kChannels>::template each<kVectors>(
        rows, Product<T>{x.data, x.by_row, x.by_column, weights, kVectors * kWidth, inputs},
        [&]<int C>(int64_t, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sums[n][v] = load<kWidth>(bias + v * kWidth);
          }
        },
        [&]<int C>(int64_t row, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              store_part(y + (row + n) * by_row + v * kWidth, sums[n][v], outputs - v * kWidth);
            }
          }
        });
  }
};

}  // namespace levit
