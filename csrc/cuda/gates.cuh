// Gates in any layout.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "types.h"

namespace levit {

// Where there are no gates all are one.
__device__ __forceinline__ float gate_of(const LevitGates& gates, int64_t image, int expert, int head) {
  if (!gates.data) return 1.0f;
  return gates.data[image * gates.per_image + expert * gates.per_expert + head * gates.per_head];
}

}  // namespace levit
