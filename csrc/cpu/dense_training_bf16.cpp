// The products of dense layers with factors rounded to bfloat16.
#include "dense_training.h"

#include <algorithm>

#include "factors.h"
#include "panels.h"
#include "scratch.h"

namespace levit {

#if defined(__x86_64__)
namespace {

enum class Memory { kColumns, kRows };

using Half = Factors<float, BFloat16>;
constexpr int kChannels = DenseTraining<float>::kChannels;
constexpr int64_t kPanel = 2 * Half::kWidth;
constexpr int64_t kTogether = 4 * kChannels;  // channels whose rounded weights stay near while all columns meet them

// out [channels, columns] (+)= w [channels, inputs] x in words [inputs / 2, whole vectors of columns]
LEVIT_INLINE void multiply_words(const Product<float>& of, const Half::Word* x, int64_t channels, int64_t columns,
                                 bool add, float* out, int64_t stride, float* room) {
  for (int64_t c = 0; c < channels; c += kTogether) {
    const int64_t count = std::min(kTogether, channels - c);
    Product<BFloat16> part = Half::weights(of.w + c * of.by_channel, of.by_channel, of.by_input, count, of.inputs, room);
    part.x = x, part.stride = columns;
    Tiles<BFloat16, Half::kWidth, kChannels>::multiply(part, count, columns, add, out + c * stride, stride);
  }
}

}  // namespace

__attribute__((target("avx512f,avx512bw,avx512bf16"))) void multiply_columns_bf16(const Product<float>& of,
                                                                                   int64_t channels, int64_t columns,
                                                                                   bool add, float* out,
                                                                                   int64_t stride) {
  const auto [w, x] =
      scratch<float, Memory::kColumns>({Half::room(kTogether, of.inputs), Half::room(of.inputs, columns)});
  auto* words = reinterpret_cast<Half::Word*>(x);
  Half::pair_rows(of.x, of.stride, of.inputs, columns, words, columns);
  multiply_words(of, words, channels, columns, add, out, stride, w);
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) void multiply_turned_bf16(const Product<float>& of,
                                                                                  int64_t channels, int64_t rows,
                                                                                  float* out, int64_t stride) {
  const auto [w, x] =
      scratch<float, Memory::kColumns>({Half::room(kTogether, of.inputs), Half::room(of.inputs, stride)});
  auto* words = reinterpret_cast<Half::Word*>(x);
  Half::pair_columns(of.x, of.stride, rows, of.inputs, words, stride);
  multiply_words(of, words, channels, stride, false, out, stride, w);
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) void multiply_rows_bf16(const Product<float>& of, int64_t rows,
                                                                                int64_t columns, float* out) {
  using OfRows = Rows<BFloat16, Half::kWidth, kChannels>;
  const auto [w, x, rest] =
      scratch<float, Memory::kRows>({Half::room(rows, of.inputs), Half::room(of.inputs, kPanel), rows * kPanel});
  const Product<BFloat16> weights = Half::weights(of.w, of.by_channel, of.by_input, rows, of.inputs, w);
  for (int64_t c = 0; c < columns; c += kPanel) {
    const int64_t count = std::min(kPanel, columns - c);
    const Product<BFloat16> part = Half::times(weights, of.x + c, of.stride, count, of.inputs, x);
    fetch_panel(of, c + kPanel, std::min(kPanel, columns - c - kPanel), rows, out + c + kPanel, columns);
    if (count == kPanel) {
      OfRows::multiply<2>(part, rows, kPanel, out + c, columns);
      continue;
    }
    // Whole vectors and then a copy: sums of which the compiler cannot tell how many are stored leave their registers.
    if (part.stride == kPanel) {
      OfRows::multiply<2>(part, rows, kPanel, rest, kPanel);
    } else {
      OfRows::multiply<1>(part, rows, Half::kWidth, rest, kPanel);
    }
    for (int64_t r = 0; r < rows; ++r) std::copy_n(rest + r * kPanel, count, out + r * columns + c);
  }
}
#else
void multiply_columns_bf16(const Product<float>&, int64_t, int64_t, bool, float*, int64_t) { __builtin_unreachable(); }
void multiply_turned_bf16(const Product<float>&, int64_t, int64_t, float*, int64_t) { __builtin_unreachable(); }
void multiply_rows_bf16(const Product<float>&, int64_t, int64_t, float*) { __builtin_unreachable(); }
#endif

}  // namespace levit
