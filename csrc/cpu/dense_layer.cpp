#include "dense_layer.h"

#include "dense_columns.h"
#include "multiversion.h"
#include "tiles.h"

namespace levit {
namespace {

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

template <class T>
LEVIT_INLINE void dense_layer(const Layer<T>& layer, int64_t k, const T* x, const Layout<T>& layout,
                              Activation activation, T* y) {
  if (layout.columns) {
    dense_columns(layer, k, x, layout.rows, y);
  } else {
    // Of eight streams fewer bytes a second arrive than of four.
    dense_parts<1>(layer, k, x, layout.rows, y, dense_parts<4>(layer, k, x, layout.rows, y, 0));
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
