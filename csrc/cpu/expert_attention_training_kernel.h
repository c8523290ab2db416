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

template <class T, int kWidth, int kChannels>
struct TrainingKernel : private WeightsKernel<T, kWidth, kChannels> {
  using V = Lanes<T, kWidth>;
  using Base = WeightsKernel<T, kWidth, kChannels>;
  using Inference = Kernel<T, kWidth, kChannels>;
  using Base::copy, Base::multiply, Base::to_panels, Base::turn;

  // A tile of images, token after token. Whole vectors of one image's tokens may reach into the next image, which is
  // computed after it, or behind the last one.
  struct Tile {
    int64_t first, count, used, stride;
    Tile(const Training<T>& step, int64_t begin, int64_t end) : first(begin), count(end - begin) {
      used = count * step.tokens;
      stride = round_up(used - step.tokens + round_up(step.tokens, kWidth), kWidth);
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
    const auto [x, z, y, p, sums] =
        scratch<T, Phase::kForward>(
            {step.pixels * lanes, width * lanes, rows * lanes, tokens * padded, features * padded});
    for (int64_t begin = images.begin; begin < images.end; begin += together) {
      const Tile tile(step, begin, std::min(begin + together, images.end));
      const int64_t stride = tile.stride;
      for (int64_t i = 0; i < tile.count; ++i) {
        const T* of_image = step.patches + (begin + i) * tokens * step.pixels;
        turn(of_image, step.pixels, tokens, step.pixels, x + i * tokens, stride);
      }
      Inference::project({step.w_embed, step.pixels, 1, x, stride, step.pixels}, step.b_embed, width, step.slope, z,
                         nullptr);
      Inference::project({step.w, step.w_stride, 1, z, stride, width}, step.b, rows, T(1), y, nullptr);
      for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t image = begin + i, at = i * tokens;
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
        copy(z + at, stride, width, tokens, step.kept_tokens + image * width * tokens, tokens);
        copy(y + at, stride, rows, tokens, step.kept_projections + image * 3 * features * tokens, tokens);
        turn(sums, padded, features, tokens, step.out + image * tokens * features, features);
      }
    }
  }

  static LEVIT_INLINE void backward(const Training<T>& step, Range images) {
    const int64_t tokens = step.tokens, padded = round_up(tokens, kWidth), features = step.features();
    const int64_t together = images_per_tile(tokens, kWidth), rows = step.rows(), width = step.width;
    const int64_t lanes = Tile(step, 0, together).stride, all = step.batch * tokens;
    const double scale = 1 / std::sqrt(static_cast<double>(step.depth));
    const int64_t square = padded * padded;
    const auto [z, by_z, y, by_y, p, by_p, turned, by_turned, grad, by_x] =
        scratch<T, Phase::kBackward>({width * lanes, width * lanes, rows * lanes, rows * lanes, square, square, square,
                                      square, features * padded, step.pixels * lanes});
    for (int64_t begin = images.begin; begin < images.end; begin += together) {
      const Tile tile(step, begin, std::min(begin + together, images.end));
      const int64_t stride = tile.stride, row = begin * tokens;
      for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t image = begin + i;
        copy(step.kept_tokens + image * width * tokens, tokens, width, tokens, z + i * tokens, stride);
        copy(step.kept_projections + image * 3 * features * tokens, tokens, rows, tokens, y + i * tokens, stride);
      }
      for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t image = begin + i, at = i * tokens;
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
      multiply({step.w, 1, step.w_stride, by_y, stride, rows}, width, stride, step.folded, by_z, stride);
      for (int64_t i = 0; i < width * stride; i += kWidth) {
        const V by_token = load<kWidth>(by_z + i);
        store(by_z + i, load<kWidth>(z + i) > 0 ? by_token : by_token * step.slope);
      }
      turn(z, stride, width, tile.used, step.token_rows + row * width, width);
      to_panels(by_y, stride, rows, tile.used, row, all, step.panels);
      to_panels(by_z, stride, width, tile.used, row, all, step.embed_panels);
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
