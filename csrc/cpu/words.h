// What a product reads at once: one number, or in bfloat16 two neighbouring inputs, a word of 32 bits, whose products one
// instruction of AVX-512 BF16 adds to a float32. That is assembly, because an intrinsic would ask every template on the
// way to it for its target.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.h"
#include "multiversion.h"

namespace levit {

template <class T, int kWidth>
struct Words {
  using Word = T;
  using Sum = T;
  using V = Lanes<Sum, kWidth>;
  static constexpr int kInputs = 1;  // in a word

  static LEVIT_INLINE T spread(const T* w) { return *w; }  // in the product; a sum V{} + *w is arithmetic
  static LEVIT_INLINE T spread_last(const T*) { return T{}; }  // no word is ever half full
  static LEVIT_INLINE void add_product(V& sum, T w, const V& x) { sum += w * x; }
  static LEVIT_INLINE V narrow(const V& sums) { return sums; }
  static LEVIT_INLINE V join(const V (&sums)[1]) { return sums[0]; }
};

template <>
struct Words<BFloat16, 16> {
  using Word = uint32_t;
  using Sum = float;
  using V = Lanes<Sum, 16>;
  using X = Lanes<Word, 16>;
  static constexpr int kInputs = 2;

  // One load for all vectors of x: as an operand in memory, the word would be read again for each.
  static LEVIT_INLINE X spread(const BFloat16* w) {
    struct Pair {
      BFloat16 inputs[2];
    };
    X word;
    asm("vpbroadcastd %1, %0" : "=v"(word) : "m"(*reinterpret_cast<const Pair*>(w)));
    return word;
  }

  // Of an odd number of inputs: what lies behind the weight is not touched.
  static LEVIT_INLINE X spread_last(const BFloat16* w) { return X{} + w->bits; }

  static LEVIT_INLINE void add_product(V& sum, const X& w, const X& x) {
    V next = sum;  // an element of an array that assembly changes would keep the array in memory
    asm("vdpbf16ps %2, %1, %0" : "+v"(next) : "v"(x), "v"(w));
    sum = next;
  }

  // Rounded to nearest, ties to even, as the instructions below do it
  static LEVIT_INLINE Lanes<uint16_t, 16> narrow(const V& sums) {
    Lanes<uint16_t, 16> half;
    asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(sums));
    return half;
  }

  // Words of two channels
  static LEVIT_INLINE X join(const V (&sums)[2]) {
    using Halves = Lanes<uint16_t, 32>;
    Halves both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(sums[0]), "v"(sums[1]));
    return interleave(both, std::make_index_sequence<32>());
  }

 private:
  template <class Halves, size_t... kLane>
  static LEVIT_INLINE X interleave(const Halves& both, std::index_sequence<kLane...>) {
    const Halves mixed = __builtin_shufflevector(both, both, (kLane / 2 + kLane % 2 * 16)...);
    X words;
    std::memcpy(&words, &mixed, sizeof(words));
    return words;
  }
};

}  // namespace levit
