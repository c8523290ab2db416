// What the kernels of expert_attention are told.
#pragma once

#include <cstdint>

#include "types.h"

struct LevitExpertAttention {
  // Everything dense: patches [B, N, P], w_embed [K, P, Q], b_embed [K, Q], w_qkv [K, Q, 3, H, d], b_qkv [K, 3, H, d]
  const void *patches, *w_embed, *b_embed, *w_qkv, *b_qkv;
  LevitGates gates;
  void* out;  // [B, N, H d], without gates [K, B, N, H d]
  int64_t batch;
  int32_t experts, tokens, pixels, width, heads, depth;
  float slope;
  int32_t type, out_type;            // LevitType
  int32_t processors, shared_bytes;  // of the GPU: how many, and how much shared memory a block may have
};

extern "C" {
// Starts the kernel; 0, or a cudaError_t, or -1 if none of them can hold these sizes.
int levit_expert_attention(const LevitExpertAttention* call, void* stream);
// 2: on tensor cores; 1: on the others; 0: sizes that no kernel can hold
int levit_expert_attention_fits(const LevitExpertAttention* call);
}
