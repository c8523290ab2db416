// What expert_attention_training_kernel.h needs done with the weights of one expert: folding queries and keys before the
// forward pass, and the gradients of the weights, sums over all tokens, after the backward pass.
#pragma once

#include "expert_attention_kernel.h"
#include "factors.h"
#include "tiles.h"

namespace levit::attention {

constexpr int64_t kTokensTogether = 128;  // a panel of so many stays in L1 while all inputs are multiplied with it

// Projections of the tokens lie head by head: queries (folded: u), keys (folded: none, the tokens are the keys), values.
template <class T>
struct Training {
  int64_t batch, tokens, pixels, width, heads, depth;
  T slope;
  bool folded;
  bool bf16;  // whether the products with weights and with tokens, nearly all of the work, round their factors
  // Everything dense: patches [B, N, P], weights of nn.Linear [Q, P] and [3, H, d, Q], biases [Q] and [3, H, d].
  const T *patches, *w_embed, *b_embed, *w_qkv, *b_qkv;
  const T* gates;  // [B or 1, H or 1] or null
  int64_t gates_per_image, gates_per_head;
  // Kept between the passes, image by image: tokens [Q, N], projections [rows(), N] at a distance of 3 H d N (or tiles of
  // images that lie so), probabilities [H, keys, queries].
  T *kept_tokens, *kept_projections, *kept_probabilities;
  // Of the projections, [rows(), w_stride] and [rows()]: w_qkv and b_qkv themselves unless folded.
  T *w, *b;
  int64_t w_stride;
  T* out;  // [B, N, H d]
  // Backward: grad and results dense, in the layout of what they belong to; by_gates [B, H]; by_patches may be null.
  const T* grad;
  T *by_patches, *by_w_embed, *by_b_embed, *by_w_qkv, *by_b_qkv, *by_gates;
  // Over all tokens, in bf16 words of two: gradients of the projections and of the embedding in panels, tokens [B N, Q];
  // then the gradients of w and b.
  T *panels, *embed_panels, *token_rows, *by_w, *by_b;
  int64_t panel_rows;  // from one panel to the next

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
enum class Rounded { kMatrices, kPatches };  // what there is memory for besides a phase's own

// A phase of a step in bf16, where has_bf16_dots(); the others stand beside their caller.
void run_bf16(const Training<float>& step, Phase phase, Range range);

template <class T, int kWidth, int kChannels, class Factor>
struct WeightsKernel : protected Tiles<T, kWidth, kChannels> {
  using V = Lanes<T, kWidth>;
  using Rows = Tiles<T, kWidth, kChannels>;
  using Large = Factors<T, Factor>;
  using Rows::copy, Rows::multiply, Rows::turn;
  using Word = typename Words<Factor, kWidth>::Word;
  static constexpr int64_t kPanel = 2 * kWidth;
  static constexpr int kTogether = Words<Factor, kWidth>::kInputs;  // tokens in a word

  static constexpr Factor one() {
    if constexpr (kTogether == 2) {
      return BFloat16{0x3F80};
    } else {
      return 1;
    }
  }

  // out [channels, columns] = w x, two matrices of weights, in whole vectors of columns
  static LEVIT_INLINE void multiply_weights(const Product<T>& of, int64_t channels, int64_t columns, T* out,
                                            int64_t stride) {
    const auto [w_room, x_room] =
        scratch<T, Rounded::kMatrices>({Large::room(channels, of.inputs), Large::room(of.inputs, columns)});
    const Product<Factor> w = Large::weights(of.w, of.by_channel, of.by_input, channels, of.inputs, w_room);
    Tiles<Factor, kWidth, kChannels>::multiply(Large::times(w, of.x, of.stride, columns, of.inputs, x_room), channels,
                                               columns, false, out, stride);
  }

  // w and b of one head from w_qkv and b_qkv: u = z W_q W_k^T + b_q W_k^T, and the values' as they are
  static LEVIT_INLINE void fold(const Training<T>& step, int64_t head) {
    const int64_t width = step.width, depth = step.depth, stride = step.w_stride;
    const T *of_query = step.w_qkv + head * depth * width, *of_key = step.w_qkv + step.key(head) * width;
    const T* bias = step.b_qkv + head * depth;
    T *w = step.w + step.query(head) * stride, *b = step.b + step.query(head);
    multiply_weights({of_key, 1, width, of_query, width, depth}, width, width, w, stride);
    std::fill(b, b + width, T(0));
    for (int64_t c = 0; c < depth; ++c) {
      for (int64_t i = 0; i < width; ++i) b[i] += bias[c] * of_key[c * width + i];
    }
    const int64_t row = (2 * step.heads + head) * depth;
    copy(step.w_qkv + row * width, width, depth, width, step.w + step.value(head) * stride, stride);
    copy(step.b_qkv + row, depth, 1, depth, step.b + step.value(head), depth);
  }

  // Sums over the tokens run over words of tokens, an odd last one of an image with a zero.
  static int64_t words(const Training<T>& step) { return (step.tokens + kTogether - 1) / kTogether; }
  static int64_t token_stride(const Training<T>& step) {
    return kTogether == 1 ? step.width : round_up(step.width, kWidth);
  }

  // to [words, to_stride] = x [channels, tokens], turned
  static LEVIT_INLINE void to_words(const T* x, int64_t stride, int64_t channels, int64_t tokens, T* to,
                                    int64_t to_stride) {
    if constexpr (kTogether == 1) {
      turn(x, stride, channels, tokens, to, to_stride);
    } else {
      Large::pair_columns(x, stride, channels, tokens, reinterpret_cast<Word*>(to), to_stride);
    }
  }

  // panels [channels / kPanel, panel_rows, kPanel] from `row` on = x [channels, tokens], turned
  static LEVIT_INLINE void to_panels(const T* x, int64_t stride, int64_t channels, int64_t tokens, int64_t row,
                                     int64_t panel_rows, T* panels) {
    for (int64_t c = 0; c < channels; c += kPanel) {
      T* panel = panels + c * panel_rows;
      to_words(x + c * stride, stride, std::min(kPanel, channels - c), tokens, panel + row * kPanel, kPanel);
    }
  }

  // The gradients of the channels [begin, end), by_w [channels, by_stride] and by_b [channels], from their panels and
  // x [all words, x_stride]; begin is a panel's first
  static LEVIT_INLINE void weight_gradients(const Training<T>& step, const T* panels, Range channels, const T* x,
                                            int64_t x_stride, int64_t inputs, T* by_w, int64_t by_stride, T* by_b) {
    const int64_t all = step.batch * words(step);
    constexpr int64_t kWordsTogether = kTokensTogether / kTogether;
    static const Factor ones[2] = {one(), one()};
    const auto of_one = Words<Factor, kWidth>::spread(ones);
    const auto [sums] = scratch<T, Phase::kWeights>({inputs * kPanel});
    for (int64_t c = channels.begin; c < channels.end; c += kPanel) {
      const int64_t count = std::min(kPanel, channels.end - c);
      const Word* panel = reinterpret_cast<const Word*>(panels) + c * step.panel_rows;
      V bias[2] = {};
      for (int64_t t = 0; t < all; t += kWordsTogether) {
        const int64_t end = std::min(all, t + kWordsTogether);
        const Product<Factor> of{reinterpret_cast<const Factor*>(x + t * x_stride), kTogether, kTogether * x_stride,
                                 panel + t * kPanel, kPanel, (end - t) * kTogether};
        Tiles<Factor, kWidth, kChannels>::multiply(of, inputs, count, t > 0, sums, kPanel);
        V part[2] = {};
        for (int64_t i = t; i < end; ++i) {
          Words<Factor, kWidth>::add_product(part[0], of_one, load<kWidth>(panel + i * kPanel));
          Words<Factor, kWidth>::add_product(part[1], of_one, load<kWidth>(panel + i * kPanel + kWidth));
        }
        bias[0] += part[0];
        bias[1] += part[1];
      }
      turn(sums, kPanel, inputs, count, by_w + c * by_stride, by_stride);
      for (int64_t n = 0; n < count; ++n) by_b[c + n] = bias[n / kWidth][n % kWidth];
    }
  }

  // The panels [begin, end): those of the projections, then those of the embedding.
  static LEVIT_INLINE void weights(const Training<T>& step, Range panels) {
    const int64_t before = (step.rows() + kPanel - 1) / kPanel;
    const auto channels = [panels](int64_t first, int64_t count) {
      return Range{std::max<int64_t>(0, panels.begin - first) * kPanel, std::min(count, (panels.end - first) * kPanel)};
    };
    weight_gradients(step, step.panels, channels(0, step.rows()), step.token_rows, token_stride(step), step.width,
                     step.by_w, step.w_stride, step.by_b);
    const Range embedding = channels(before, step.width);
    if (embedding.begin >= embedding.end) return;
    const T* patches = step.patches;
    int64_t stride = step.pixels;
    if constexpr (kTogether == 2) {
      stride = round_up(step.pixels, kWidth);
      const auto [paired] = scratch<T, Rounded::kPatches>({step.batch * words(step) * stride});
      for (int64_t i = 0; i < step.batch; ++i) {
        Large::pair_rows(step.patches + i * step.tokens * step.pixels, step.pixels, step.tokens, step.pixels,
                         reinterpret_cast<Word*>(paired) + i * words(step) * stride, stride);
      }
      patches = paired;
    }
    weight_gradients(step, step.embed_panels, embedding, patches, stride, step.pixels, step.by_w_embed, step.pixels,
                     step.by_b_embed);
  }

  // One head's part of by_w_qkv and by_b_qkv from by_w and by_b. The keys' bias cancels in the softmax.
  static LEVIT_INLINE void unfold(const Training<T>& step, int64_t head) {
    const int64_t width = step.width, depth = step.depth, stride = step.w_stride;
    const int64_t key = step.key(head), value = (2 * step.heads + head) * depth;
    const T *of_query = step.w_qkv + head * depth * width, *of_key = step.w_qkv + key * width;
    const T *bias = step.b_qkv + head * depth, *by_b = step.by_b + step.query(head);
    const T* by_w = step.by_w + step.query(head) * stride;  // [outputs, inputs]
    const auto [turned, product] = scratch<T, Phase::kUnfold>({width * stride, depth * stride});
    multiply_weights({of_key, width, 1, by_w, stride, width}, depth, width, product, stride);
    copy(product, stride, depth, width, step.by_w_qkv + head * depth * width, width);
    turn(by_w, stride, width, width, turned, stride);
    multiply_weights({of_query, width, 1, turned, stride, width}, depth, width, product, stride);
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
