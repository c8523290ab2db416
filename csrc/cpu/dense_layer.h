// A dense layer, its weights as nn.Linear keeps them. For one to four rows the reading of the weights is all that counts,
// and the inner products run along the inputs. For more the rows become lanes, weights are broadcast, and nothing is
// summed across lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dot.h"
#include "lanes.h"
#include "words.h"

namespace levit {

// One layer of all experts: weights [K, out, in], bias [K, out].
template <class T>
struct Layer {
  using Sum = typename Words<T, 16>::Sum;
  const T* weight;
  const Sum* bias;
  int64_t in, out;
};

enum class Activation { kNone, kTanh, kRelu };

// Where number i of row r lies: rows [rows, size], or columns [size, rows] whose rows are padded to whole vectors.
template <class T>
struct Layout {
  int64_t rows;
  bool columns;

  explicit Layout(int64_t count, bool always_columns = false)
      : rows(count), columns(always_columns || count > kMostRows) {
    if (columns) rows = (count + kLanesOf<T> - 1) / kLanesOf<T> * kLanesOf<T>;
  }
  int64_t at(int64_t r, int64_t i, int64_t size) const { return columns ? i * rows + r : r * size + i; }

 private:
  static constexpr int64_t kMostRows = 4;  // up to which rows are not worth turning into lanes
};

// y = activation(x w^T + b) of expert k, x and y of one layout
void dense(const Layer<float>& layer, int64_t k, const float* x, const Layout<float>& layout, Activation activation,
           float* y);
void dense(const Layer<double>& layer, int64_t k, const double* x, const Layout<double>& layout, Activation activation,
           double* y);
// In columns only, and only where has_bf16_dots(): x is rounded, y is not.
void dense(const Layer<BFloat16>& layer, int64_t k, const float* x, const Layout<float>& layout, Activation activation,
           float* y);

// to [size, stride] = from [rows, size]
void turn_rows(const float* from, int64_t rows, int64_t size, float* to, int64_t stride);
void turn_rows(const double* from, int64_t rows, int64_t size, double* to, int64_t stride);

// from [rows, size] in that layout, `copies` times one after another; padding is zero
template <class T>
void lay_out(const T* from, int64_t rows, int64_t size, int64_t copies, const Layout<T>& layout, T* to) {
  if (!layout.columns) {
    for (int64_t copy = 0; copy < copies; ++copy) to = std::copy(from, from + rows * size, to);
    return;
  }
  turn_rows(from, rows, size, to, layout.rows);
  for (int64_t i = 0; i < size; ++i, to += layout.rows) {
    for (int64_t copy = 1; copy < copies; ++copy) std::copy(to, to + rows, to + copy * rows);
    std::fill(to + rows * copies, to + layout.rows, T(0));
  }
}

}  // namespace levit
