// One vector of kWidth numbers, and what the compiler's vector extensions lack: unaligned access, powers of two, the
// transposition of a square of vectors. Everything is inlined: the caller's target decides the instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "multiversion.h"

namespace levit {

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

template <class T, int kWidth>
using Lanes __attribute__((vector_size(kWidth * sizeof(T)))) = T;

constexpr int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

template <int kWidth, class T>
LEVIT_INLINE Lanes<T, kWidth> load(const T* from) {
  Lanes<T, kWidth> lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

template <class T, class V>
LEVIT_INLINE void store(T* to, const V& lanes) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

// Asks for `count` numbers that are about to be read, or written.
template <bool kToWrite = false, class T>
LEVIT_INLINE void fetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i, kToWrite);
}

// The coefficients ln(2)^n / n! of 2^x. On [-1/2, 1/2] the terms left out are below the rounding of T.
template <class T>
struct PowerSeries {
  static constexpr int kLast = sizeof(T) == 4 ? 7 : 13;
  T coefficient[kLast + 1];
  constexpr PowerSeries() : coefficient() {
    double term = 1;
    for (int n = 0; n <= kLast; term *= 0.693147180559945309417 / ++n) coefficient[n] = static_cast<T>(term);
  }
};

// 2^x for x <= 0: 0 where the result would be subnormal, NaN where x is
template <class T, int kWidth>
LEVIT_INLINE Lanes<T, kWidth> exp2_of_negative(const Lanes<T, kWidth>& x) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  using Limits = std::numeric_limits<T>;
  constexpr int kMantissa = Limits::digits - 1;
  constexpr T kRound = static_cast<T>(Bits(3) << (kMantissa - 1));  // added, it leaves the nearest integer in low bits
  constexpr PowerSeries<T> kSeries;
  const Lanes<T, kWidth> shifted = x + kRound, rest = x - (shifted - kRound);
  Lanes<T, kWidth> power = Lanes<T, kWidth>{} + kSeries.coefficient[kSeries.kLast];
#pragma GCC unroll 16
  for (int n = kSeries.kLast - 1; n >= 0; --n) power = power * rest + kSeries.coefficient[n];
  Lanes<Bits, kWidth> exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  exponent = (exponent + Bits(Limits::max_exponent - 1)) << kMantissa;
  Lanes<T, kWidth> scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return x < static_cast<T>(Limits::min_exponent - 1) ? Lanes<T, kWidth>{} : power * scale;
}

// Columns of the 2 x 2 blocks whose corners lie kStep apart, in rows a and b that lie kStep apart.
template <int kStep, class V, size_t... kLane>
LEVIT_INLINE void swap_blocks(V& a, V& b, std::index_sequence<kLane...>) {
  constexpr size_t kWidth = sizeof...(kLane);
  const V left = __builtin_shufflevector(a, b, (kLane & kStep ? kWidth + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(a, b, (kLane & kStep ? kWidth + kLane : kLane + kStep)...);
  a = left;
}

template <int kStep = 1, class V, size_t kWidth>
LEVIT_INLINE void transpose(V (&rows)[kWidth]) {
  if constexpr (kStep < kWidth) {
#pragma GCC unroll 16
    for (size_t row = 0; row < kWidth; ++row) {
      if (!(row & kStep)) swap_blocks<kStep>(rows[row], rows[row + kStep], std::make_index_sequence<kWidth>());
    }
    transpose<2 * kStep>(rows);
  }
}

}  // namespace levit
