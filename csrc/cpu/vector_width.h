// A kernel that is a template of its vector width, compiled for several, and which of them may run here.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <type_traits>

namespace levit {

// Bytes of the widest vectors that this CPU has and ATEN_CPU_CAPABILITY, torch's own limit, allows: 64, 32 or 16.
inline int64_t vector_bytes() {
#if defined(__x86_64__)
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view most = limit ? limit : "";
  if (most == "default") return 16;
  if (most != "avx2" && __builtin_cpu_supports("avx512f")) return 64;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 32;
#endif
  return 16;
}

// Whether those vectors multiply and add up pairs of bfloat16 numbers.
inline bool has_bf16_dots() {
#if defined(__x86_64__)
  return vector_bytes() == 64 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
#else
  return false;
#endif
}

// Whether products of T, asked to round their factors to bfloat16, can do so.
template <class T>
bool rounds_factors(bool asked) {
  return asked && std::is_same_v<T, float> && has_bf16_dots();
}

}  // namespace levit

// define(width, target, T, bytes, channels) for every vector width and T: functions named <name>_<width>, each with its
// target, its vectors' bytes and how many rows of sums fit into its registers.
#if defined(__x86_64__)
#define LEVIT_EACH_WIDTH(define)                                    \
  define(plain, , float, 16, 6)                                     \
  define(plain, , double, 16, 6)                                    \
  define(avx2, __attribute__((target("avx2,fma"))), float, 32, 6)   \
  define(avx2, __attribute__((target("avx2,fma"))), double, 32, 6)  \
  define(avx512, __attribute__((target("avx512f"))), float, 64, 12) \
  define(avx512, __attribute__((target("avx512f"))), double, 64, 12)
#else
#define LEVIT_EACH_WIDTH(define) \
  define(plain, , float, 16, 6)  \
  define(plain, , double, 16, 6)
#endif

// A pointer called as the functions are = <name>_<width> for vectors of that many bytes
#if defined(__x86_64__)
#define LEVIT_CHOOSE(name, bytes)          \
  do {                                     \
    name = name##_plain;                   \
    if (bytes == 32) name = name##_avx2;   \
    if (bytes == 64) name = name##_avx512; \
  } while (false)
#else
#define LEVIT_CHOOSE(name, bytes) name = name##_plain
#endif
