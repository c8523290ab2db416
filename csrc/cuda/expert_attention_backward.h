// What the kernels of expert_attention's backward pass are told.
#pragma once

#include "expert_attention.h"

struct LevitExpertAttentionBackward {
  LevitExpertAttention forward;  // its `out` is not used
  const void* grad;              // of the result, of its shape and type
  // Working memory, written and read again: tokens and their gradients [K, B N, Q], those of queries, keys and values
  // [K, B N, 3 H d]
  float *tokens, *by_tokens, *by_qkv;
  float* by_gates;  // [B, K, H]; null without gates
  // In the layout and type of what they belong to; what is null is not wanted.
  void *by_patches, *by_w_embed, *by_b_embed, *by_w_qkv, *by_b_qkv;
};

extern "C" {
// Starts the kernels; 0, or a cudaError_t, or -1 if a block cannot hold these sizes. A bias comes with its weights.
int levit_expert_attention_backward(const LevitExpertAttentionBackward* call, void* stream);
int levit_expert_attention_backward_fits(const LevitExpertAttentionBackward* call);
}
