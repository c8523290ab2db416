// What the kernel of expert_attention is called with: sizes, and where patches, weights and gates lie.
#pragma once

#include <cstdint>

#include "words.h"

namespace levit::attention {

// One matrix [inputs, channels] per expert. Either its channels (dense in torch's order) or its inputs (a view of
// nn.Linear's) are consecutive: by_channel or by_input is 1.
template <class T>
struct Weights {
  const T* data;
  int64_t by_expert, by_channel, by_input;

  const T* at(int64_t expert, int64_t channel) const { return data + expert * by_expert + channel * by_channel; }
};

// Weights of Q inputs and the bias of every channel.
template <class T>
struct Projection {
  using Sum = typename Words<T, 16>::Sum;
  Weights<T> weights;
  const Sum* bias;
  int64_t bias_by_expert;

  const Sum* bias_at(int64_t expert, int64_t channel) const { return bias + expert * bias_by_expert + channel; }
};

template <class T>
struct Call {
  using Sum = typename Words<T, 16>::Sum;
  int64_t experts, batch, tokens, pixels, width, heads, depth;
  const T* patches;
  int64_t image_stride, token_stride, pixel_stride;
  Weights<T> w_embed;                   // P inputs, Q channels
  const Sum* b_embed;                   // [K, Q]
  bool folded;                          // the queries meet the tokens themselves, there are no keys
  Projection<T> queries, keys, values;  // H x d channels, queries H x Q where folded
  const Sum* gates = nullptr;           // [B or 1, K, H or 1]
  int64_t gates_per_image = 0, gates_per_expert = 0;
  Sum negative_slope = 0;
  T* out = nullptr;  // without gates: [K, B, N, E], dense in N and E
  int64_t out_by_expert = 0, out_by_image = 0;

  int64_t query_depth() const { return folded ? width : depth; }
  int64_t features() const { return heads * depth; }
  Sum gate(int64_t image, int64_t expert, int64_t head) const {
    if (!gates) return 1;
    const Sum* of_expert = gates + image * gates_per_image + expert * gates_per_expert;
    return of_expert[gates_per_expert == 1 ? 0 : head];
  }
  bool uses(int64_t image, int64_t expert) const {
    if (!gates) return true;
    for (int64_t h = 0; h < gates_per_expert; ++h) {
      if (gate(image, expert, h) != 0) return true;
    }
    return false;
  }
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// The kernel for bfloat16, where has_bf16_dots(); the others stand beside their caller.
void run_bf16(const Call<BFloat16>& call, Range images, Range experts, float* out);

}  // namespace levit::attention
