// What the kernels of dkf_fuse are told.
#pragma once

#include <cstdint>

#include "types.h"

struct LevitDkfFuse {
  const void* features;  // [M, K, N, E], each [N, E] dense
  int64_t per_row, per_expert;
  LevitGates gates;
  const int64_t* index;  // [B] or null
  int64_t rows, batch;
  int32_t experts, tokens, width, heads;  // E; heads of the gates, 1 for a gate per expert
  int32_t type, out_type;                 // LevitType: of the features; of out and grad
  void* out;                              // [B, N, E]
  // Backward; what is null is not wanted.
  const void* grad;   // [B, N, E]
  float* by_gates;    // [B, K, H]
  void* by_features;  // [M, K, N, E], dense, of the features' type
};

extern "C" {
// Each starts its kernels; 0, or a cudaError_t.
int levit_dkf_fuse(const LevitDkfFuse* call, void* stream);
int levit_dkf_fuse_backward(const LevitDkfFuse* call, void* stream);
}
