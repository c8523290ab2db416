#include "dense_training.h"

#include <algorithm>

#include "multiversion.h"
#include "panels.h"
#include "scratch.h"

namespace levit {
namespace {

enum class Memory { kRest };

template <class T>
LEVIT_INLINE void multiply_to_rows(Product<T> of, int64_t rows, int64_t columns, T* out) {
  constexpr int kWidth = kLanesOf<T>;
  using OfRows = Rows<T, kWidth, DenseTraining<T>::kChannels>;
  constexpr int64_t kPanel = 2 * kWidth;
  int64_t c = 0;
  for (; c + kPanel <= columns; c += kPanel, of.x += kPanel) {
    fetch_panel(of, kPanel, std::min(kPanel, columns - c - kPanel), rows, out + c + kPanel, columns);
    OfRows::template multiply<2>(of, rows, kPanel, out + c, columns);
  }
  if (c == columns) return;
  const auto [rest] = scratch<T, Memory::kRest>({of.inputs * kPanel});  // no vector may reach behind x
  for (int64_t i = 0; i < of.inputs; ++i) {
    const T* from = of.x + i * of.stride;
    T* to = rest + i * kPanel;
    std::fill(std::copy(from, from + columns - c, to), to + kPanel, T(0));
  }
  of.x = rest, of.stride = kPanel;
  if (columns - c > kWidth) {
    OfRows::template multiply<2>(of, rows, columns - c, out + c, columns);
  } else {
    OfRows::template multiply<1>(of, rows, columns - c, out + c, columns);
  }
}

}  // namespace

#define LEVIT_PRODUCTS(T)                                                                                             \
  LEVIT_MULTIVERSION void multiply_columns(const Product<T>& of, int64_t channels, int64_t columns, bool add, T* out, \
                                           int64_t stride) {                                                          \
    Tiles<T, kLanesOf<T>, DenseTraining<T>::kChannels>::multiply(of, channels, columns, add, out, stride);            \
  }                                                                                                                   \
  LEVIT_MULTIVERSION void multiply_rows(const Product<T>& of, int64_t rows, int64_t columns, T* out) {                \
    multiply_to_rows(of, rows, columns, out);                                                                         \
  }
LEVIT_PRODUCTS(float)
LEVIT_PRODUCTS(double)
#undef LEVIT_PRODUCTS

}  // namespace levit
