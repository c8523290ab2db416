// What the dense layers of every type share: the product whose columns are lanes, and the activation behind it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dense_layer.h"
#include "functions.h"
#include "products.h"

namespace levit {

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

// y [out, columns] = w x + b, x [in, columns], for kVectors vectors of columns; `next` is read after these weights
template <int kVectors, class T, class Sum = typename Layer<T>::Sum>
LEVIT_INLINE void dense_columns(const Layer<T>& layer, int64_t k, const typename Words<T, 16>::Word* x, int64_t columns,
                                Sum* y, const T* next) {
  constexpr int kWidth = kLanesOf<Sum>, kChannels = 12;
  using Number = Words<T, kWidth>;
  using V = typename Number::V;
  const T* w = layer.weight + k * layer.out * layer.in;
  const Sum* bias = layer.bias + k * layer.out;
  Products<T, kWidth>::template all_channels<kChannels, kVectors>(
      layer.out, Product<T>{w, layer.in, Number::kInputs, x, columns, layer.in}, next,
      FromBias<Sum>{bias},
      [&]<int C>(int64_t c, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) store(y + (c + n) * columns + v * kWidth, sums[n][v]);
        }
      });
}

// The same for all columns, whole vectors of them
template <class T, class Sum = typename Layer<T>::Sum>
LEVIT_INLINE void dense_columns(const Layer<T>& layer, int64_t k, const typename Words<T, 16>::Word* x, int64_t columns,
                                Sum* y) {
  constexpr int kWidth = kLanesOf<Sum>;
  const T *w = layer.weight + k * layer.out * layer.in, *end = w + layer.out * layer.in;
  int64_t column = 0;
  for (int64_t after = 2 * kWidth; after <= columns; column = after, after += 2 * kWidth) {
    dense_columns<2>(layer, k, x + column, columns, y + column, after == columns ? end : w);
  }
  if (column < columns) dense_columns<1>(layer, k, x + column, columns, y + column, end);
}

}  // namespace levit
