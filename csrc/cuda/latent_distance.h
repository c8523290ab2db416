// What the kernels of latent_distance are told. All tensors are dense.
#pragma once

#include <cstdint>

#include "types.h"

struct LevitLatentDistance {
  const void *codes, *query;  // [K, M, L], [M, L]
  int64_t samples;
  int32_t experts, latent;
  int32_t type;    // LevitType of codes, query and their gradients
  float* partial;  // [K, levit_latent_distance_partials(M)], written and read again
  float* out;      // [K]
  // Backward; what is null is not wanted.
  const float* grad;  // [K]
  void *by_codes, *by_query;
};

extern "C" {
int64_t levit_latent_distance_partials(int64_t samples);
// Each starts its kernels; 0, or a cudaError_t.
int levit_latent_distance(const LevitLatentDistance* call, void* stream);
int levit_latent_distance_backward(const LevitLatentDistance* call, void* stream);
}
