// bfloat16 and half as CUDA has them: two bytes, conversions that round to the nearest, ties to even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace levit::gpu {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t exponent = x.bits >> 10 & 31, rest = x.bits & 0x3FF;
  float magnitude;
  if (exponent == 31) {
    magnitude = std::bit_cast<float>(0x7F800000 | rest << 13);
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(rest), -24);
  } else {
    magnitude = std::bit_cast<float>((exponent + 112) << 23 | rest << 13);
  }
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7FFF};
  return {static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16)};
}
template <>
inline f16 from_float<f16>(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x), sign = word >> 16 & 0x8000;
  const float magnitude = std::fabs(x);
  if (x != x) return {0x7FFF};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7C00)};
  // the spacing of halves at this magnitude; of subnormals 2^-24
  const int exponent = magnitude < 0x1p-14f ? -14 : static_cast<int>((word >> 23 & 255)) - 127;
  const uint32_t steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // 1024 steps are the implicit bit, which carries into the exponent
  const uint32_t base = magnitude < 0x1p-14f ? 0 : static_cast<uint32_t>(exponent + 14) << 10;
  return {static_cast<uint16_t>(sign | (base + steps))};
}

}  // namespace levit::gpu
