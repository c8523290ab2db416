// What the kernels of several ops are told; plain C, so that a test without torch can call them too.
#pragma once

#include <cstdint>

enum LevitType { kLevitFloat = 0, kLevitBFloat16 = 1, kLevitHalf = 2 };

// [B or 1, K, H or 1] by these distances: 0 where one image's or one head's gate serves all
struct LevitGates {
  const float* data;
  int64_t per_image, per_expert, per_head;
};
