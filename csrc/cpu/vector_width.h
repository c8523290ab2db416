// Which vectors a kernel compiled for several widths may use here.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string_view>

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

}  // namespace levit
