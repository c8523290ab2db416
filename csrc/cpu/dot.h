// Inner products in vectors of 64 bytes, whatever the machine has: the compiler cuts them into what there is.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "multiversion.h"

namespace levit {

template <class T>
constexpr int kLanesOf = 64 / sizeof(T);

template <class T, class S>
LEVIT_INLINE Lanes<T, kLanesOf<T>> load_as(const S* from) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    const auto halves = load<kLanesOf<T>>(reinterpret_cast<const uint16_t*>(from));
    const auto words = __builtin_convertvector(halves, Lanes<uint32_t, kLanesOf<T>>) << 16;
    Lanes<T, kLanesOf<T>> lanes;
    std::memcpy(&lanes, &words, sizeof(lanes));
    return lanes;
  } else {
    return load<kLanesOf<T>>(from);
  }
}

template <class T, class S>
LEVIT_INLINE T value_as(S from) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    const uint32_t word = static_cast<uint32_t>(from.bits) << 16;
    T number;
    std::memcpy(&number, &word, sizeof(number));
    return number;
  } else {
    return from;
  }
}

// The sum of all lanes, half by half.
template <int kWidth, class V>
LEVIT_INLINE auto sum_of(const V& lanes) {
  if constexpr (kWidth == 1) {
    return lanes[0];
  } else {
    V upper = lanes;
    for (int i = 0; i < kWidth / 2; ++i) upper[i] = lanes[i + kWidth / 2];
    return sum_of<kWidth / 2>(lanes + upper);
  }
}

// out[k * out_stride] += sum of a[i] * b[k * stride + i] for kRows rows of b at once: so many streams of reads in flight
template <int kRows, class T, class S>
LEVIT_INLINE void add_dots(const T* a, const S* b, int64_t stride, T* out, int64_t out_stride, int64_t count) {
  constexpr int kWidth = kLanesOf<T>;
  Lanes<T, kWidth> sums[kRows] = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const auto factor = load_as<T>(a + i);
    for (int k = 0; k < kRows; ++k) sums[k] += factor * load_as<T>(b + k * stride + i);
  }
  for (int k = 0; k < kRows; ++k) {
    T total = sum_of<kWidth>(sums[k]);
    for (int64_t j = i; j < count; ++j) total += a[j] * value_as<T>(b[k * stride + j]);
    out[k * out_stride] += total;
  }
}

}  // namespace levit
