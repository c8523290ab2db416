// The products of a dense layer in training, weights as nn.Linear keeps them. Rows (images) are lanes: activations lie
// channel by channel, [channels, stride], whole vectors of rows. Only the gradients of weights, sums over the rows, want
// channels as lanes; they read what the layer read in rows, [rows, channels]. In bfloat16 only the factors of products
// are rounded: sums, and all that is kept, stay float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "dense_layer.h"
#include "products.h"
#include "tiles.h"

namespace levit {

// out [channels, stride] (+)= w [channels, inputs] x [inputs, columns], whole vectors of columns
void multiply_columns(const Product<float>& of, int64_t channels, int64_t columns, bool add, float* out, int64_t stride);
void multiply_columns(const Product<double>& of, int64_t channels, int64_t columns, bool add, double* out,
                      int64_t stride);

// out [rows, columns], dense, = w [rows, inputs] x [inputs, columns], any number of columns
void multiply_rows(const Product<float>& of, int64_t rows, int64_t columns, float* out);
void multiply_rows(const Product<double>& of, int64_t rows, int64_t columns, double* out);

// The same with factors rounded to bfloat16, where has_bf16_dots()
void multiply_columns_bf16(const Product<float>& of, int64_t channels, int64_t columns, bool add, float* out,
                           int64_t stride);
void multiply_rows_bf16(const Product<float>& of, int64_t rows, int64_t columns, float* out);

// out [channels, stride] = w [channels, inputs] x^T of x [rows, inputs], in whole vectors of rows, zeros behind them
void multiply_turned_bf16(const Product<float>& of, int64_t channels, int64_t rows, float* out, int64_t stride);

// Asks for a panel of `count` columns from column `c` on: what a product reads of x, and where its rows go. They lie a
// page or so apart, so no hardware prefetcher sees them coming.
template <class T>
LEVIT_INLINE void fetch_panel(const Product<T>& of, int64_t c, int64_t count, int64_t rows, T* out, int64_t stride) {
  for (int64_t i = 0; i < of.inputs; ++i) fetch(of.x + i * of.stride + c, count);
  for (int64_t r = 0; r < rows; ++r) fetch<true>(out + r * stride, count);
}

template <class T>
struct TrainedLayer {
  const T *weight, *bias;  // [out, in], [out]
  int64_t in, out;
  T *by_weight, *by_bias;
  bool bf16;  // whether its products round their factors
};

template <class T>
struct DenseTraining {
  static constexpr int kWidth = kLanesOf<T>, kChannels = 12;
  using V = Lanes<T, kWidth>;

  static LEVIT_INLINE void columns_of(const TrainedLayer<T>& layer, const Product<T>& of, int64_t channels,
                                      int64_t columns, bool add, T* out, int64_t stride) {
    if constexpr (std::is_same_v<T, float>) {
      if (layer.bf16) return multiply_columns_bf16(of, channels, columns, add, out, stride);
    }
    multiply_columns(of, channels, columns, add, out, stride);
  }

  static LEVIT_INLINE void rows_of(const TrainedLayer<T>& layer, const Product<T>& of, int64_t rows, int64_t columns,
                                   T* out) {
    if constexpr (std::is_same_v<T, float>) {
      if (layer.bf16) return multiply_rows_bf16(of, rows, columns, out);
    }
    multiply_rows(of, rows, columns, out);
  }

  // y [out, columns] = w x + b for the outputs [begin, end), x [in, columns]
  static LEVIT_INLINE void forward(const TrainedLayer<T>& layer, int64_t begin, int64_t end, const T* x, int64_t stride,
                                   int64_t columns, T* y) {
    y += begin * stride;
    const Product<T> product{layer.weight + begin * layer.in, layer.in, 1, x, stride, layer.in};
    columns_of(layer, product, end - begin, columns, false, y, stride);
    add_bias(layer, begin, end, stride, columns, y);
  }

  // The same of x [rows, in], for a layer in bf16: words are made of rows as well as of columns
  static LEVIT_INLINE void forward_rows(const TrainedLayer<T>& layer, int64_t begin, int64_t end, const T* x,
                                        int64_t rows, int64_t stride, T* y) {
    if constexpr (std::is_same_v<T, float>) {
      y += begin * stride;
      multiply_turned_bf16({layer.weight + begin * layer.in, layer.in, 1, x, layer.in, layer.in}, end - begin, rows, y,
                           stride);
      add_bias(layer, begin, end, stride, stride, y);
    }
  }

  static LEVIT_INLINE void add_bias(const TrainedLayer<T>& layer, int64_t begin, int64_t end, int64_t stride,
                                    int64_t columns, T* y) {
    for (int64_t c = begin; layer.bias && c < end; ++c, y += stride) {
      for (int64_t r = 0; r < columns; r += kWidth) store(y + r, load<kWidth>(y + r) + layer.bias[c]);
    }
  }

  // by_x [in, columns] (+)= w^T by_y for the inputs [begin, end)
  static LEVIT_INLINE void to_inputs(const TrainedLayer<T>& layer, int64_t begin, int64_t end, const T* by_y,
                                     int64_t stride, int64_t columns, bool add, T* by_x) {
    const Product<T> product{layer.weight + begin, 1, layer.in, by_y, stride, layer.out};
    columns_of(layer, product, end - begin, columns, add, by_x + begin * stride, stride);
  }

  // The same for a first layer whose input's gradient leaves in rows, by_x [rows, in]
  static LEVIT_INLINE void to_input_rows(const TrainedLayer<T>& layer, const T* by_y, int64_t stride, int64_t rows,
                                         T* by_x) {
    rows_of(layer, {by_y, 1, stride, layer.weight, layer.in, layer.out}, rows, layer.in, by_x);
  }

  // The gradients of the weights and biases of the outputs [begin, end) from by_y [out, rows] and x [rows, in]
  static LEVIT_INLINE void to_weights(const TrainedLayer<T>& layer, int64_t begin, int64_t end, const T* by_y,
                                      int64_t stride, int64_t rows, const T* x) {
    const Product<T> product{by_y + begin * stride, stride, 1, x, layer.in, rows};
    rows_of(layer, product, end - begin, layer.in, layer.by_weight + begin * layer.in);
    for (int64_t c = begin; layer.by_bias && c < end; ++c) layer.by_bias[c] = sum(by_y + c * stride, rows);
  }

  static LEVIT_INLINE T sum(const T* x, int64_t count) {
    V lanes{};
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) lanes += load<kWidth>(x + i);
    T total = sum_of<kWidth>(lanes);
    for (; i < count; ++i) total += x[i];
    return total;
  }

  // Rows [rows, channels] become columns [channels, stride], zero up to `columns` rows.
  static LEVIT_INLINE void to_columns(const T* from, int64_t from_stride, int64_t rows, int64_t channels, T* to,
                                      int64_t stride, int64_t columns) {
    Tiles<T, kWidth, kChannels>::turn(from, from_stride, rows, channels, to, stride);
    for (int64_t c = 0; rows < columns && c < channels; ++c) {
      std::fill(to + c * stride + rows, to + c * stride + columns, T(0));
    }
  }

  static LEVIT_INLINE void to_rows(const T* from, int64_t stride, int64_t channels, int64_t rows, T* to) {
    Tiles<T, kWidth, kChannels>::turn(from, stride, channels, rows, to, channels);
  }
};

}  // namespace levit
