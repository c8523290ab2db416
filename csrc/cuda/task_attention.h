// What the kernels of task_attention are told: one form for both ways in which tokens meet patches (see
// levit_kernels/cuda/task_attention.py). C numbers are a query's depth.
#pragma once

#include <cstdint>

#include "types.h"

// [H, B, T, C] by these distances, the C numbers dense
struct LevitByHead {
  int64_t per_head, per_image, per_token;
};

struct LevitTaskAttention {
  const void* query;            // [H, T, C], dense
  const float* own_scores;      // [H, T]: of each token with itself, scaled
  const void *keys, *values;    // [B, N, G, C], dense: each group serves H / G heads
  const void* own_values;       // [H, T, C] by own_per_head, which may be 0
  int64_t own_per_head;
  void* out;  // sums of the values, the token's own included
  LevitByHead out_by;
  int64_t batch;
  int32_t heads, tokens, groups, patches, depth;
  float scale;
  int32_t type;          // LevitType of all but own_scores and what follows as float
  int32_t shared_bytes;  // that a block may have
  // Backward
  const void* grad;  // of out
  LevitByHead grad_by;
  void* attention;                      // [B, H, T, N]
  void* by_scores;                      // [H, T, B, N], before they were scaled
  float *own_attention, *by_own_score;  // [H, T, B], of each token with itself
};

extern "C" {
// Each starts its kernel; 0, or a cudaError_t, or -1 if a block cannot hold the scores of so many patches.
int levit_task_attention(const LevitTaskAttention* call, void* stream);
int levit_task_attention_backward(const LevitTaskAttention* call, void* stream);
int levit_task_attention_fits(const LevitTaskAttention* call);  // whether a block of the backward pass can
}
