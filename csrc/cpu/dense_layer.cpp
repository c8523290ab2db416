#include "dense_layer.h"

#include <algorithm>

#include "functions.h"
#include "multiversion.h"
#include "products.h"
#include "tiles.h"

namespace levit {
namespace {

// y [count] = activation(y)
template <class T>
LEVIT_INLINE void activate(T* y, int64_t count, Activation activation) {
  constexpr int kWidth = kLanesOf<T>;
  using V = Lanes<T, kWidth>;
  const auto of = [activation](const V& x) __attribute__((always_inline)) {
    return activation == Activation::kTanh ? tanh_of<T>(x) : x < 0 ? V{} : x;  // a NaN is not below zero
  };
  if (activation == Activation::kNone) return;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(y + i, of(load<kWidth>(y + i)));
  if (i == count) return;
  T rest[kWidth] = {};
  std::copy(y + i, y + count, rest);
  store(rest, of(load<kWidth>(rest)));
  std::copy(rest, rest + count - i, y + i);
}

// y [rows, out] = x [rows, in] w^T + b for the outputs from `first` on, in kOut equal parts, one output of each part at a
// time: so many long streams of reads, which the hardware prefetches, where neighbouring rows would make short ones.
// Returns the first output that is left over.
template <int kOut, class T>
LEVIT_INLINE int64_t dense_parts(const Layer<T>& layer, int64_t k, const T* x, int64_t rows, T* y, int64_t first) {
  const int64_t in = layer.in, out = layer.out, part = (out - first) / kOut;
  const T *w = layer.weight + (k * out + first) * in, *bias = layer.bias + k * out + first;
  y += first;
  for (int64_t o = 0; o < part; ++o, w += in, ++bias, ++y) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int i = 0; i < kOut; ++i) y[r * out + i * part] = bias[i * part];
      add_dots<kOut>(x + r * in, w, part * in, y + r * out, part, in);
    }
  }
  return first + part * kOut;
}

// y [out, columns] = w x + b, x [in, columns], for kVectors vectors of columns; `next` is read after these weights
template <int kVectors, class T>
LEVIT_INLINE void dense_columns(const Layer<T>& layer, int64_t k, const T* x, int64_t columns, T* y, const T* next) {
  constexpr int kWidth = kLanesOf<T>, kChannels = 12;
  using V = Lanes<T, kWidth>;
  const T *w = layer.weight + k * layer.out * layer.in, *bias = layer.bias + k * layer.out;
  Products<T, kWidth>::template all_channels<kChannels, kVectors>(
      layer.out, Product<T>{w, layer.in, 1, x, columns, layer.in}, next,
      [&]<int C>(int64_t c, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sums[n][v] = V{} + bias[c + n];
        }
      },
      [&]<int C>(int64_t c, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) store(y + (c + n) * columns + v * kWidth, sums[n][v]);
        }
      });
}

template <class T>
LEVIT_INLINE void dense_layer(const Layer<T>& layer, int64_t k, const T* x, const Layout<T>& layout,
                              Activation activation, T* y) {
  constexpr int kWidth = kLanesOf<T>;
  if (layout.columns) {
    const T *w = layer.weight + k * layer.out * layer.in, *end = w + layer.out * layer.in;
    int64_t column = 0;
    for (int64_t after = 2 * kWidth; after <= layout.rows; column = after, after += 2 * kWidth) {
      dense_columns<2>(layer, k, x + column, layout.rows, y + column, after == layout.rows ? end : w);
    }
    if (column < layout.rows) dense_columns<1>(layer, k, x + column, layout.rows, y + column, end);
  } else {
    dense_parts<1>(layer, k, x, layout.rows, y, dense_parts<8>(layer, k, x, layout.rows, y, 0));
  }
  activate(y, layout.rows * layer.out, activation);
}

}  // namespace

LEVIT_MULTIVERSION void turn_rows(const float* from, int64_t rows, int64_t size, float* to, int64_t stride) {
  Tiles<float, kLanesOf<float>, 12>::turn(from, size, rows, size, to, stride);
}

LEVIT_MULTIVERSION void turn_rows(const double* from, int64_t rows, int64_t size, double* to, int64_t stride) {
  Tiles<double, kLanesOf<double>, 12>::turn(from, size, rows, size, to, stride);
}

LEVIT_MULTIVERSION void dense(const Layer<float>& layer, int64_t k, const float* x, const Layout<float>& layout,
                              Activation activation, float* y) {
  dense_layer(layer, k, x, layout, activation, y);
}

LEVIT_MULTIVERSION void dense(const Layer<double>& layer, int64_t k, const double* x, const Layout<double>& layout,
                              Activation activation, double* y) {
  dense_layer(layer, k, x, layout, activation, y);
}

}  // namespace levit
