// The factors of a product as they are multiplied: as they lie, or float32 numbers rounded to bfloat16 and laid out in
// words (words.h). Rounding is a pass over each factor, so it pays where every number is used in many products.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "multiversion.h"
#include "products.h"

namespace levit {

template <class T, class Factor = T>
struct Factors {
  // How many numbers of T the room for a factor [rows, columns], either of them the inputs, has to hold
  static constexpr int64_t room(int64_t, int64_t) { return 0; }

  // The weights [channels, inputs] of a product that has no x yet
  static LEVIT_INLINE Product<T> weights(const T* w, int64_t by_channel, int64_t by_input, int64_t, int64_t inputs, T*) {
    return {w, by_channel, by_input, nullptr, 0, inputs};
  }

  // The same product of x [inputs, columns]
  static LEVIT_INLINE Product<T> times(Product<T> weights, const T* x, int64_t stride, int64_t, int64_t, T*) {
    weights.x = x, weights.stride = stride;
    return weights;
  }
};

template <>
struct Factors<float, BFloat16> {
  static constexpr int kWidth = 16;
  using Number = Words<BFloat16, kWidth>;
  using Word = Number::Word;

  static constexpr int64_t room(int64_t rows, int64_t columns) {
    return round_up(rows, kWidth) * round_up(columns, kWidth) / Number::kInputs;
  }

  // by_channel or by_input is 1.
  static LEVIT_INLINE Product<BFloat16> weights(const float* w, int64_t by_channel, int64_t by_input, int64_t channels,
                                                int64_t inputs, float* room) {
    auto* to = reinterpret_cast<BFloat16*>(room);
    const int64_t even = round_up(inputs, Number::kInputs);
    if (by_input != 1) {
      const int64_t stride = round_up(channels, kWidth);
      pair_rows(w, by_input, inputs, channels, reinterpret_cast<Word*>(room), stride);
      return {to, Number::kInputs, Number::kInputs * stride, nullptr, 0, even};
    }
    const int64_t stride = round_up(inputs, kWidth);
    for (int64_t c = 0; c < channels; ++c, w += by_channel, to += stride) {
      for (int64_t i = 0; i < inputs; i += kWidth) store(to + i, Number::narrow(load_part(w + i, inputs - i)));
    }
    return {reinterpret_cast<BFloat16*>(room), stride, Number::kInputs, nullptr, 0, even};
  }

  static LEVIT_INLINE Product<BFloat16> times(Product<BFloat16> weights, const float* x, int64_t stride, int64_t columns,
                                              int64_t inputs, float* room) {
    weights.x = reinterpret_cast<Word*>(room), weights.stride = round_up(columns, kWidth);
    pair_rows(x, stride, inputs, columns, reinterpret_cast<Word*>(room), weights.stride);
    return weights;
  }

  // to [rows / 2, to_stride] = words of two rows of from [rows, columns], an odd last one with zeros
  static LEVIT_INLINE void pair_rows(const float* from, int64_t stride, int64_t rows, int64_t columns, Word* to,
                                     int64_t to_stride) {
    for (int64_t r = 0; r < rows; r += 2, from += 2 * stride, to += to_stride) {
      for (int64_t c = 0; c < columns; c += kWidth) {
        const Number::V pair[2] = {load_part(from + c, columns - c),
                                   r + 1 < rows ? load_part(from + stride + c, columns - c) : Number::V{}};
        store(to + c, Number::join(pair));
      }
    }
  }

  // to [columns / 2, to_stride] = words of two columns of from [rows, columns], an odd last one with zeros
  static LEVIT_INLINE void pair_columns(const float* from, int64_t stride, int64_t rows, int64_t columns, Word* to,
                                        int64_t to_stride) {
    for (int64_t r = 0; r < rows; r += kWidth) {
      for (int64_t c = 0; c < columns; c += kWidth) {
        const float* square = from + r * stride + c;
        Word* words = to + c / Number::kInputs * to_stride + r;
        if (r + kWidth <= rows && c + kWidth <= columns) {
          pair_square<true>(square, stride, kWidth, kWidth, words, to_stride);
        } else {
          pair_square<false>(square, stride, rows - r, columns - c, words, to_stride);
        }
      }
    }
  }

 private:
  template <bool kWhole>
  static LEVIT_INLINE void pair_square(const float* from, int64_t stride, int64_t rows, int64_t columns, Word* to,
                                       int64_t to_stride) {
    Number::V square[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i, from += stride) {
      square[i] = kWhole ? load<kWidth>(from) : i < rows ? load_part(from, columns) : Number::V{};
    }
    transpose(square);
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; i += Number::kInputs, to += to_stride) {
      const Number::V pair[2] = {square[i], square[i + 1]};  // zeros were read behind the columns
      if (kWhole || i < columns) store(to, Number::join(pair));
    }
  }

  // The first `count` numbers, zeros behind them
  static LEVIT_INLINE Number::V load_part(const float* from, int64_t count) {
    if (count >= kWidth) return load<kWidth>(from);
    Number::V lanes{};
    std::memcpy(&lanes, from, count * sizeof(float));
    return lanes;
  }
};

}  // namespace levit
