#include "dense_training.h"

#include <algorithm>

#include "multiversion.h"
#include "panels.h"
#include "scratch.h"

namespace levit {
namespace {

enum class Memory { kRest };

template <class T>
struct RowProduct {
  static constexpr int kWidth = kLanesOf<T>, kChannels = DenseTraining<T>::kChannels;
  using V = Lanes<T, kWidth>;

  // Of kVectors vectors the first `columns` numbers
  template <int kVectors>
  static LEVIT_INLINE void panel(const Product<T>& of, int64_t rows, int64_t columns, T* out, int64_t stride) {
    Rows<T, kWidth, kChannels>::template each<kVectors>(
        rows, of,
        FromZero{},
        [&]<int C>(int64_t row, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              store_part(out + (row + n) * stride + v * kWidth, sums[n][v], columns - v * kWidth);
            }
          }
        });
  }

  static LEVIT_INLINE void multiply(Product<T> of, int64_t rows, int64_t columns, T* out) {
    int64_t c = 0;
    for (; c + 2 * kWidth <= columns; c += 2 * kWidth, of.x += 2 * kWidth) {
      panel<2>(of, rows, 2 * kWidth, out + c, columns);
    }
    if (c == columns) return;
    const auto [rest] = scratch<T, Memory::kRest>({of.inputs * 2 * kWidth});  // no vector may reach behind x
    for (int64_t i = 0; i < of.inputs; ++i) {
      const T* from = of.x + i * of.stride;
      T* to = rest + i * 2 * kWidth;
      std::fill(std::copy(from, from + columns - c, to), to + 2 * kWidth, T(0));
    }
    of.x = rest, of.stride = 2 * kWidth;
    if (columns - c > kWidth) {
      panel<2>(of, rows, columns - c, out + c, columns);
    } else {
      panel<1>(of, rows, columns - c, out + c, columns);
    }
  }

};

}  // namespace

#define LEVIT_PRODUCTS(T)                                                                                             \
  LEVIT_MULTIVERSION void multiply_columns(const Product<T>& of, int64_t channels, int64_t columns, bool add, T* out, \
                                           int64_t stride) {                                                          \
    Tiles<T, kLanesOf<T>, DenseTraining<T>::kChannels>::multiply(of, channels, columns, add, out, stride);            \
  }                                                                                                                   \
  LEVIT_MULTIVERSION void multiply_rows(const Product<T>& of, int64_t rows, int64_t columns, T* out) {                \
    RowProduct<T>::multiply(of, rows, columns, out);                                                                  \
  }
LEVIT_PRODUCTS(float)
LEVIT_PRODUCTS(double)
#undef LEVIT_PRODUCTS

}  // namespace levit
