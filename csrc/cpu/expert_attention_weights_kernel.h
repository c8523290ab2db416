// What expert_attention_training_kernel.h needs done with the weights of one expert: folding queries and keys before the
// forward pass, and the gradients of the weights, sums over all tokens, after the backward pass.
#pragma once

#include "expert_attention_kernel.h"
#include "tiles.h"

namespace levit::attention {

constexpr int64_t kTokensTogether = 128;  // a panel of so many stays in L1 while all inputs are multiplied with it

// Projections of the tokens lie head by head: queries (folded: u), keys (folded: none, the tokens are the keys), values.
template <class T>
struct Training {
  int64_t batch, tokens, pixels, width, heads, depth;
  T slope;
  bool folded;
  // Everything dense: patches [B, N, P], weights of nn.Linear [Q, P] and [3, H, d, Q], biases [Q] and [3, H, d].
  const T *patches, *w_embed, *b_embed, *w_qkv, *b_qkv;
  const T* gates;  // [B or 1, H or 1] or null
  int64_t gates_per_image, gates_per_head;
  // Kept between the passes, image by image: tokens [Q, N], projections [rows(), N] at a distance of 3 H d N,
  // probabilities [H, keys, queries].
  T *kept_tokens, *kept_projections, *kept_probabilities;
  // Of the projections, [rows(), w_stride] and [rows()]: w_qkv and b_qkv themselves unless folded.
  T *w, *b;
  int64_t w_stride;
  T* out;  // [B, N, H d]
  // Backward: grad and results dense, in the layout of what they belong to; by_gates [B, H]; by_patches may be null.
  const T* grad;
  T *by_patches, *by_w_embed, *by_b_embed, *by_w_qkv, *by_b_qkv, *by_gates;
  // Over all tokens: gradients of the projections and of the embedding in panels, tokens [B N, Q]; then the gradients of
  // w and b.
  T *panels, *embed_panels, *token_rows, *by_w, *by_b;

  int64_t features() const { return heads * depth; }
  int64_t query_width() const { return folded ? width : depth; }
  int64_t query(int64_t head) const { return head * query_width(); }
  int64_t key(int64_t head) const { return (heads + head) * depth; }
  int64_t value(int64_t head) const { return heads * (folded ? width : 2 * depth) + head * depth; }
  int64_t rows() const { return value(heads); }
  T gate(int64_t image, int64_t head) const {
    return gates ? gates[image * gates_per_image + head * gates_per_head] : T(1);
  }
};

// Whether one product of tokens with a [Q, Q] matrix per head is cheaper than two with [Q, d], the matrix included, and
// the matrix can be computed where the weights lie: the vector that ends a query's row runs into the keys' and values'.
template <class T>
bool folding_saves(int64_t tokens, int64_t width, int64_t heads, int64_t depth) {
  constexpr int64_t kMostLanes = kAlignment / sizeof(T);
  return 2 * depth > width && tokens * (2 * depth - width) > width * depth && 2 * heads * depth * width >= kMostLanes;
}

enum class Phase { kFold, kForward, kBackward, kWeights, kUnfold };

template <class T, int kWidth, int kChannels>
struct WeightsKernel : protected Tiles<T, kWidth, kChannels> {
  using V = Lanes<T, kWidth>;
  using Rows = Tiles<T, kWidth, kChannels>;
  using Rows::copy, Rows::multiply, Rows::turn;
  static constexpr int64_t kPanel = 2 * kWidth;

  // w and b of one head from w_qkv and b_qkv: u = z W_q W_k^T + b_q W_k^T, and the values' as they are
  static LEVIT_INLINE void fold(const Training<T>& step, int64_t head) {
    const int64_t width = step.width, depth = step.depth, stride = step.w_stride;
    const T *of_query = step.w_qkv + head * depth * width, *of_key = step.w_qkv + step.key(head) * width;
    const T* bias = step.b_qkv + head * depth;
    T *w = step.w + step.query(head) * stride, *b = step.b + step.query(head);
    multiply({of_key, 1, width, of_query, width, depth}, width, width, false, w, stride);
    std::fill(b, b + width, T(0));
    for (int64_t c = 0; c < depth; ++c) {
      for (int64_t i = 0; i < width; ++i) b[i] += bias[c] * of_key[c * width + i];
    }
    const int64_t row = (2 * step.heads + head) * depth;
    copy(step.w_qkv + row * width, width, depth, width, step.w + step.value(head) * stride, stride);
    copy(step.b_qkv + row, depth, 1, depth, step.b + step.value(head), depth);
  }

  // panels [channels / kPanel, all, kPanel] from `row` on = x [channels, tokens], turned
  static LEVIT_INLINE void to_panels(const T* x, int64_t stride, int64_t channels, int64_t tokens, int64_t row,
                                     int64_t all, T* panels) {
    for (int64_t c = 0; c < channels; c += kPanel) {
      turn(x + c * stride, stride, std::min(kPanel, channels - c), tokens, panels + c * all + row * kPanel, kPanel);
    }
  }

  // The gradients of at most kPanel channels, by_w [channels, inputs] and by_b [channels], from their panel and
  // x [tokens, inputs]
  static LEVIT_INLINE void weight_gradients(const T* panel, int64_t channels, const T* x, int64_t inputs,
                                            int64_t tokens, T* by_w, int64_t stride, T* by_b) {
    const auto [sums] = scratch<T, Phase::kWeights>({inputs * kPanel});
    V bias[2] = {};
    for (int64_t t = 0; t < tokens; t += kTokensTogether) {
      const int64_t end = std::min(tokens, t + kTokensTogether);
      multiply({x + t * inputs, 1, inputs, panel + t * kPanel, kPanel, end - t}, inputs, channels, t > 0, sums, kPanel);
      V part[2] = {};
      for (int64_t i = t; i < end; ++i) {
        part[0] += load<kWidth>(panel + i * kPanel);
        part[1] += load<kWidth>(panel + i * kPanel + kWidth);
      }
      bias[0] += part[0];
      bias[1] += part[1];
    }
    turn(sums, kPanel, inputs, channels, by_w, stride);
    for (int64_t c = 0; c < channels; ++c) by_b[c] = bias[c / kWidth][c % kWidth];
  }

  // The panels [begin, end): those of the projections, then those of the embedding.
  static LEVIT_INLINE void weights(const Training<T>& step, Range panels) {
    const int64_t all = step.batch * step.tokens, of_projections = (step.rows() + kPanel - 1) / kPanel;
    for (int64_t i = panels.begin; i < panels.end; ++i) {
      const bool embeds = i >= of_projections;
      const int64_t c = (embeds ? i - of_projections : i) * kPanel;
      const int64_t channels = std::min(kPanel, (embeds ? step.width : step.rows()) - c);
      if (embeds) {
        weight_gradients(step.embed_panels + c * all, channels, step.patches, step.pixels, all,
                         step.by_w_embed + c * step.pixels, step.pixels, step.by_b_embed + c);
      } else {
        weight_gradients(step.panels + c * all, channels, step.token_rows, step.width, all,
                         step.by_w + c * step.w_stride, step.w_stride, step.by_b + c);
      }
    }
  }

  // One head's part of by_w_qkv and by_b_qkv from by_w and by_b. The keys' bias cancels in the softmax.
  static LEVIT_INLINE void unfold(const Training<T>& step, int64_t head) {
    const int64_t width = step.width, depth = step.depth, stride = step.w_stride;
    const int64_t key = step.key(head), value = (2 * step.heads + head) * depth;
    const T *of_query = step.w_qkv + head * depth * width, *of_key = step.w_qkv + key * width;
    const T *bias = step.b_qkv + head * depth, *by_b = step.by_b + step.query(head);
    const T* by_w = step.by_w + step.query(head) * stride;  // [outputs, inputs]
    const auto [turned, product] = scratch<T, Phase::kUnfold>({width * stride, depth * stride});
    multiply({of_key, width, 1, by_w, stride, width}, depth, width, false, product, stride);
    copy(product, stride, depth, width, step.by_w_qkv + head * depth * width, width);
    turn(by_w, stride, width, width, turned, stride);
    multiply({of_query, width, 1, turned, stride, width}, depth, width, false, product, stride);
    T *by_key = step.by_w_qkv + key * width, *by_bias = step.by_b_qkv;
    for (int64_t c = 0; c < depth; ++c) {
      T sum = 0;
      for (int64_t i = 0; i < width; ++i) {
        by_key[c * width + i] = product[c * stride + i] + bias[c] * by_b[i];
        sum += of_key[c * width + i] * by_b[i];
      }
      by_bias[head * depth + c] = sum;
      by_bias[key + c] = 0;
    }
    copy(step.by_w + step.value(head) * stride, stride, depth, width, step.by_w_qkv + value * width, width);
    copy(step.by_b + step.value(head), depth, 1, depth, by_bias + value, depth);
  }
};

}  // namespace levit::attention
