// Matrix products with the columns of x as lanes: vectors of sums stay in registers, weights are broadcast from memory.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "multiversion.h"
#include "words.h"

namespace levit {

// w [channels, inputs] times x [inputs, stride], w at any two strides. In bfloat16 x lies in words, [inputs / 2, stride],
// an odd last one with a zero; a word's two weights are consecutive, and `by_input` leads to the next word's.
template <class T>
struct Product {
  const T* w;
  int64_t by_channel, by_input;
  const typename Words<T, 16>::Word* x;
  int64_t stride, inputs;
};

// Where sums begin, for Products and Rows
struct FromZero {
  template <class V, int C, int kVectors>
  LEVIT_INLINE void operator()(int64_t, V (&sums)[C][kVectors]) const {
#pragma GCC unroll 16
    for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[n][v] = V{};
    }
  }
};

template <class Sum>
struct FromBias {
  const Sum* bias;  // [channels]

  template <class V, int C, int kVectors>
  LEVIT_INLINE void operator()(int64_t c, V (&sums)[C][kVectors]) const {
#pragma GCC unroll 16
    for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[n][v] = V{} + bias[c + n];
    }
  }
};

template <class T, int kWidth>
struct Products : protected Words<T, kWidth> {
  using Number = Words<T, kWidth>;
  using Word = typename Number::Word;
  using V = typename Number::V;

  // sums[c][v] += w[c] x[v] over the inputs; `ahead` is where the next weights will be read, or null.
  template <int C, int kVectors>
  static LEVIT_INLINE void multiply(V (&sums)[C][kVectors], const Product<T>& of, const T* ahead) {
    // Three rows to a pointer, one stride for all: so many addresses and no more fit into the integer registers.
    constexpr int kRows = 3, kPointers = (C + kRows - 1) / kRows;
    constexpr int kInputs = Number::kInputs;
    const T* w[kPointers];
    const Word* x = of.x;
#pragma GCC unroll 8
    for (int row = 0; row < kPointers; ++row) w[row] = of.w + row * kRows * of.by_channel;
    for (int64_t i = 0; i < of.inputs / kInputs; ++i, x += of.stride) {
      if (ahead) {
        const bool rows = of.by_input == kInputs;
        const T* next = ahead + i * (rows ? C * kInputs : of.by_input);  // of dense rows: as many numbers as are read
        for (size_t byte = 0; byte < C * sizeof(Word); byte += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(next) + byte);
        }
        if (!rows) __builtin_prefetch(next + C - 1);  // most often in a line of its own
      }
      Lanes<Word, kWidth> in[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) in[v] = load<kWidth>(x + v * kWidth);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        const auto weight = Number::spread(w[c / kRows] + c % kRows * of.by_channel);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) Number::add_product(sums[c][v], weight, in[v]);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kPointers; ++row) w[row] += of.by_input;
    }
    if (of.inputs % kInputs == 0) return;
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const auto weight = Number::spread_last(w[c / kRows] + c % kRows * of.by_channel);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) Number::add_product(sums[c][v], weight, load<kWidth>(x + v * kWidth));
    }
  }

  // start(c, sums), the product over the inputs, finish(c, sums) for C channels at a time, from c on while they last
  template <int C, int kVectors, class Start, class Finish>
  static LEVIT_INLINE void blocks(int64_t& c, int64_t channels, Product<T> of, const T* after, const Start& start,
                                  const Finish& finish) {
    for (; c + C <= channels; c += C) {
      V sums[C][kVectors];
      start(c, sums);
      Product<T> block = of;
      block.w += c * of.by_channel;
      const T* ahead = after ? (c + C < channels ? block.w + C * of.by_channel : after) : nullptr;
      multiply(sums, block, ahead);
      finish(c, sums);
    }
  }

  template <int C, int kVectors, class Start, class Finish>
  static LEVIT_INLINE void all_channels(int64_t channels, const Product<T>& of, const T* after, const Start& start,
                                        const Finish& finish) {
    int64_t c = 0;
    blocks<C, kVectors>(c, channels, of, after, start, finish);
    if constexpr (C > 4) blocks<4, kVectors>(c, channels, of, after, start, finish);
    if constexpr (Number::kInputs == 2) blocks<2, kVectors>(c, channels, of, after, start, finish);
    blocks<1, kVectors>(c, channels, of, after, start, finish);
  }
};

}  // namespace levit
