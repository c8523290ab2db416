// One expert in training: the forward pass that keeps its activations, and the backward pass. As in
// expert_attention_kernel.h tokens are the lanes, so activations lie channel by channel. Only the gradients of the
// weights, sums over all tokens, want channels as lanes: the backward pass turns its results around, into panels of two
// vectors, and a second pass multiplies those.
//
// Where it saves work, queries and keys are folded: q k^T = (z W_q + b_q) (z W_k + b_k)^T is, up to terms that a softmax
// over the keys cancels, u z^T with u = z W_q W_k^T + b_q W_k^T. So one product takes the place of two, three times.
#pragma once

#include "expert_attention_weights_kernel.h"

namespace levit::attention {

// Factor is what the products with weights and with tokens, nearly all of the work, multiply: T or, rounded, BFloat16.
template <class T, int kWidth, int kChannels, class Factor = T>
struct TrainingKernel : private WeightsKernel<T, kWidth, kChannels, Factor> {
  using V = Lanes<T, kWidth>;
  using Base = WeightsKernel<T, kWidth, kChannels, Factor>;
  using Inference = Kernel<Factor, kWidth, kChannels>;
  using Large = Factors<T, Factor>;
  using Base::copy, Base::multiply, Base::to_panels, Base::to_words, Base::turn;

  // A tile of images, token after token. Whole vectors of one image's tokens may reach into the next image, which is
  // computed after it, or behind the last one. A tile of nothing but whole vectors is kept as it is.
  struct Tile {
    int64_t first, count, used, stride;
    Tile(const Training<T>& step, int64_t begin, int64_t end) : first(begin), count(end - begin) {
      used = count * step.tokens;
      stride = round_up(used - step.tokens + round_up(step.tokens, kWidth), kWidth);
    }

    bool is_kept() const { return stride == used; }
    T* tokens_in(const Training<T>& step) const { return step.kept_tokens + first * step.width * step.tokens; }
    T* projections_in(const Training<T>& step) const {
      return step.kept_projections + first * 3 * step.features() * step.tokens;
    }
  };

  // p [keys, padded queries] = softmax over the keys of scale q^T k; q and k are [depth, stride]
  static LEVIT_INLINE void probabilities(const T* q, const T* k, int64_t stride, int64_t tokens, int64_t inputs,
                                         double scale, T* p, int64_t padded) {
    constexpr int kKeys = kChannels == 12 ? 16 : kChannels;
    const T powers_of_two = static_cast<T>(1.44269504088896340736 * scale);
    for (int64_t t = 0; t < tokens; t += kWidth) {
      const Product<T> scores{k, 1, stride, q + t, stride, inputs};
      Products<T, kWidth>::template all_channels<kKeys, 1>(
          tokens, scores, nullptr,
          []<int C>(int64_t, V(&sums)[C][1]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int n = 0; n < C; ++n) sums[n][0] = V{};
          },
          [&]<int C>(int64_t key, V(&sums)[C][1]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int n = 0; n < C; ++n) store(p + (key + n) * padded + t, sums[n][0]);
          });
      V most = load<kWidth>(p + t);
      for (int64_t key = 1; key < tokens; ++key) {
        const V score = load<kWidth>(p + key * padded + t);
        most = score > most ? score : most;
      }
      V total{};
      for (int64_t key = 0; key < tokens; ++key) {
        const V score = load<kWidth>(p + key * padded + t);
        const V power = exp2_of_negative<T, kWidth>((score - most) * powers_of_two);
        store(p + key * padded + t, power);
        total += power;
      }
      const V share = T(1) / total;
      for (int64_t key = 0; key < tokens; ++key) {
        store(p + key * padded + t, load<kWidth>(p + key * padded + t) * share);
      }
    }
  }

  // p [keys, padded queries] and its gradient by_p -> p becomes gate p, by_p the gradient of q^T k. Returns the gate's
  // gradient: a query's sum of p by_p is also the sum of its output times that output's gradient.
  static LEVIT_INLINE T softmax_backward(T* p, T* by_p, int64_t tokens, int64_t padded, T gate, double scale) {
    const T factor = static_cast<T>(scale) * gate;
    T by_gate = 0;
    for (int64_t t = 0; t < tokens; t += kWidth) {
      V sum{};
      for (int64_t key = 0; key < tokens; ++key) {
        sum += load<kWidth>(p + key * padded + t) * load<kWidth>(by_p + key * padded + t);
      }
      for (int64_t key = 0; key < tokens; ++key) {
        T *share = p + key * padded + t, *by_share = by_p + key * padded + t;
        const V probability = load<kWidth>(share);
        store(by_share, probability * (load<kWidth>(by_share) - sum) * factor);
        store(share, probability * gate);
      }
      for (int64_t i = 0; i < std::min<int64_t>(kWidth, tokens - t); ++i) by_gate += sum[i];
    }
    return by_gate;
  }

  static LEVIT_INLINE void forward(const Training<T>& step, Range images) {
    const int64_t tokens = step.tokens, padded = round_up(tokens, kWidth), features = step.features();
    const int64_t together = images_per_tile(tokens, kWidth), rows = step.rows(), width = step.width;
    const int64_t lanes = Tile(step, 0, together).stride;
    const double scale = 1 / std::sqrt(static_cast<double>(step.depth));
    const auto [x, own_z, own_y, p, sums, embed_room, room, tile_room] = scratch<T, Phase::kForward>(
        {step.pixels * lanes, width * lanes, rows * lanes, tokens * padded, features * padded,
         Large::room(width, step.pixels), Large::room(rows, width), Large::room(std::max(step.pixels, width), lanes)});
    const Product<Factor> embed = Large::weights(step.w_embed, step.pixels, 1, width, step.pixels, embed_room);
    const Product<Factor> projections = Large::weights(step.w, step.w_stride, 1, rows, width, room);
    for (int64_t begin = images.begin; begin < images.end; begin += together) {
      const Tile tile(step, begin, std::min(begin + together, images.end));
      const int64_t stride = tile.stride;
      T *z = tile.is_kept() ? tile.tokens_in(step) : own_z, *y = tile.is_kept() ? tile.projections_in(step) : own_y;
      for (int64_t i = 0; i < tile.count; ++i) {
        const T* of_image = step.patches + (begin + i) * tokens * step.pixels;
        turn(of_image, step.pixels, tokens, step.pixels, x + i * tokens, stride);
      }
      Inference::project(Large::times(embed, x, stride, stride, step.pixels, tile_room), step.b_embed, width, step.slope,
                         z, nullptr);
      Inference::project(Large::times(projections, z, stride, stride, width, tile_room), step.b, rows, T(1), y, nullptr);
      for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t image = begin + i, at = i * tokens, next = image + together;
        if (next < images.end) {  // while this tile is computed, ask for where the next one goes
          fetch<true>(step.kept_tokens + next * width * tokens, width * tokens);
          fetch<true>(step.kept_projections + next * 3 * features * tokens, rows * tokens);
        }
        for (int64_t h = 0; h < step.heads; ++h) {
          const T* keys = (step.folded ? z : y + step.key(h) * stride) + at;
          probabilities(y + step.query(h) * stride + at, keys, stride, tokens, step.query_width(), scale, p, padded);
          copy(p, padded, tokens, tokens, step.kept_probabilities + (image * step.heads + h) * tokens * tokens, tokens);
          T* to = sums + h * step.depth * padded;
          const T* values = y + step.value(h) * stride + at;
          multiply({values, stride, 1, p, padded, tokens}, step.depth, padded, false, to, padded);
          const T gate = step.gate(image, h);
          for (int64_t c = 0; step.gates && c < step.depth * padded; c += kWidth) {
            store(to + c, gate == 0 ? V{} : load<kWidth>(to + c) * gate);  // a gate of zero lets no NaN through
          }
        }
        if (!tile.is_kept()) {
          copy(z + at, stride, width, tokens, step.kept_tokens + image * width * tokens, tokens);
          copy(y + at, stride, rows, tokens, step.kept_projections + image * 3 * features * tokens, tokens);
        }
        turn(sums, padded, features, tokens, step.out + image * tokens * features, features);
      }
    }
  }

  static LEVIT_INLINE void backward(const Training<T>& step, Range images) {
    const int64_t tokens = step.tokens, padded = round_up(tokens, kWidth), features = step.features();
    const int64_t together = images_per_tile(tokens, kWidth), rows = step.rows(), width = step.width;
    const int64_t lanes = Tile(step, 0, together).stride;
    const double scale = 1 / std::sqrt(static_cast<double>(step.depth));
    const int64_t square = padded * padded;
    const auto [own_z, by_z, own_y, by_y, p, by_p, turned, by_turned, grad, by_x, room, tile_room] =
        scratch<T, Phase::kBackward>({width * lanes, width * lanes, rows * lanes, rows * lanes, square, square, square,
                                      square, features * padded, step.pixels * lanes, Large::room(width, rows),
                                      Large::room(rows, lanes)});
    const Product<Factor> back = Large::weights(step.w, 1, step.w_stride, width, rows, room);
    for (int64_t begin = images.begin; begin < images.end; begin += together) {
      const Tile tile(step, begin, std::min(begin + together, images.end));
      const int64_t stride = tile.stride, row = begin * tokens;
      const T *z = tile.is_kept() ? tile.tokens_in(step) : own_z, *y = tile.is_kept() ? tile.projections_in(step) : own_y;
      for (int64_t i = 0; !tile.is_kept() && i < tile.count; ++i) {
        const int64_t image = begin + i;
        copy(step.kept_tokens + image * width * tokens, tokens, width, tokens, own_z + i * tokens, stride);
        copy(step.kept_projections + image * 3 * features * tokens, tokens, rows, tokens, own_y + i * tokens, stride);
      }
      for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t image = begin + i, at = i * tokens, next = image + together;
        if (next < images.end) {  // while this tile is computed, ask for what the next one reads
          fetch(step.kept_tokens + next * width * tokens, width * tokens);
          fetch(step.kept_projections + next * 3 * features * tokens, rows * tokens);
          fetch(step.grad + next * tokens * features, tokens * features);
        }
        turn(step.grad + image * tokens * features, features, tokens, features, grad, padded);
        for (int64_t h = 0; h < step.heads; ++h) {
          const T *of_head = grad + h * step.depth * padded, *query = y + step.query(h) * stride + at;
          const T *keys = (step.folded ? z : y + step.key(h) * stride) + at, *values = y + step.value(h) * stride + at;
          T *by_query = by_y + step.query(h) * stride + at, *by_value = by_y + step.value(h) * stride + at;
          T* by_keys = (step.folded ? by_z : by_y + step.key(h) * stride) + at;
          copy(step.kept_probabilities + (image * step.heads + h) * tokens * tokens, tokens, tokens, tokens, p, padded);
          multiply({values, 1, stride, of_head, padded, step.depth}, tokens, padded, false, by_p, padded);
          const T gate = step.gate(image, h);
          step.by_gates[image * step.heads + h] = softmax_backward(p, by_p, tokens, padded, gate, scale);
          if (gate == 0) {  // whatever the expert computes
            std::fill(p, p + tokens * padded, T(0));
            std::fill(by_p, by_p + tokens * padded, T(0));
          }
          turn(p, padded, tokens, padded, turned, padded);
          turn(by_p, padded, tokens, padded, by_turned, padded);
          const int64_t inputs = step.query_width();
          multiply({keys, stride, 1, by_p, padded, tokens}, inputs, padded, false, by_query, stride);
          multiply({query, stride, 1, by_turned, padded, tokens}, inputs, padded, step.folded && h, by_keys, stride);
          multiply({of_head, padded, 1, turned, padded, tokens}, step.depth, padded, false, by_value, stride);
        }
      }
      const Product<Factor> by_tokens = Large::times(back, by_y, stride, stride, rows, tile_room);
      Tiles<Factor, kWidth, kChannels>::multiply(by_tokens, width, stride, step.folded, by_z, stride);
      for (int64_t i = 0; i < width * stride; i += kWidth) {
        const V by_token = load<kWidth>(by_z + i);
        store(by_z + i, load<kWidth>(z + i) > 0 ? by_token : by_token * step.slope);
      }
      const auto keep = [&](int64_t at, int64_t count, int64_t word) __attribute__((always_inline)) {
        const int64_t token_stride = Base::token_stride(step);
        to_words(z + at, stride, width, count, step.token_rows + word * token_stride, token_stride);
        to_panels(by_y + at, stride, rows, count, word, step.panel_rows, step.panels);
        to_panels(by_z + at, stride, width, count, word, step.panel_rows, step.embed_panels);
      };
      if (Base::kTogether == 1) keep(0, tile.used, row);
      for (int64_t i = 0; Base::kTogether > 1 && i < tile.count; ++i) {
        keep(i * tokens, tokens, (begin + i) * Base::words(step));
      }
      if (!step.by_patches) continue;
      multiply({step.w_embed, 1, step.pixels, by_z, stride, width}, step.pixels, stride, false, by_x, stride);
      turn(by_x, stride, step.pixels, tile.used, step.by_patches + row * step.pixels, step.pixels);
    }
  }

  static LEVIT_INLINE void run(const Training<T>& step, Phase phase, Range range) {
    if (phase == Phase::kForward) forward(step, range);
    if (phase == Phase::kBackward) backward(step, range);
    if (phase == Phase::kWeights) Base::weights(step, range);
    for (int64_t head = range.begin; head < range.end; ++head) {
      if (phase == Phase::kFold) Base::fold(step, head);
      if (phase == Phase::kUnfold) Base::unfold(step, head);
    }
  }
};

}  // namespace levit::attention
