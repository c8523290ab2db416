// Which experts a block of images needs.
#pragma once

#include <cstdint>

#include "expert_attention.h"
#include "gates.cuh"
#include "gpu.h"

namespace levit {

// Whether any of the images needs the expert: what all of them gate by zero is not even read.
__device__ __forceinline__ bool is_used(const LevitExpertAttention& call, int64_t first, int images, int expert) {
  for (int64_t image = first; image < first + images && image < call.batch; ++image) {
    for (int head = 0; head < call.heads; ++head) {
      if (gate_of(call.gates, image, expert, head) != 0.0f) return true;
    }
  }
  return false;
}

__device__ __forceinline__ int next_used(const int* used, int expert, int end) {
  while (expert < end && !used[expert]) ++expert;
  return expert;
}

}  // namespace levit
