// Functions of vectors that the layers of a network want.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "multiversion.h"

namespace levit {

// tanh to the rounding of 1; a NaN stays one
template <class T, class V>
LEVIT_INLINE V tanh_of(const V& x) {
  const V size = x < 0 ? -x : x;
  const V power = exp2_of_negative<T, sizeof(V) / sizeof(T)>(size * static_cast<T>(-2 * 1.44269504088896340736));
  const V tanh = (1 - power) / (1 + power);
  return x < 0 ? -tanh : tanh;
}

// e^x where that is a normal number; a NaN stays one. x = n ln(2) + rest, and n times the upper part of ln(2) is exact.
template <class T, class V>
LEVIT_INLINE V exp_of(const V& x) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  using Limits = std::numeric_limits<T>;
  constexpr int kWidth = sizeof(V) / sizeof(T), kMantissa = Limits::digits - 1;
  constexpr T kRound = static_cast<T>(Bits(3) << (kMantissa - 1));
  constexpr T kUpper = sizeof(T) == 4 ? T(0.693359375) : T(6.93145751953125e-1);
  constexpr T kLower = sizeof(T) == 4 ? T(-2.12194440054690583e-4) : T(1.42860682030941723212e-6);
  constexpr PowerSeries<T> kSeries;
  const V shifted = x * static_cast<T>(1.44269504088896340736) + kRound, turns = shifted - kRound;
  const V rest = (x - turns * kUpper - turns * kLower) * static_cast<T>(1.44269504088896340736);
  V power = V{} + kSeries.coefficient[kSeries.kLast];
#pragma GCC unroll 16
  for (int n = kSeries.kLast - 1; n >= 0; --n) power = power * rest + kSeries.coefficient[n];
  Lanes<Bits, kWidth> exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  exponent = (exponent + Bits(Limits::max_exponent - 1)) << kMantissa;
  V scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return power * scale;
}

}  // namespace levit
