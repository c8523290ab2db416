// The kernel of task_attention for one vector width: what T tokens draw from the keys and values of one image and head.
// Tokens are the lanes of the scores, as all images share the queries: these are turned around once, the keys are
// broadcast from where a projection left them, and the softmax never runs across lanes. For the sums the lanes are the
// channels of the values, so that they leave in the order in which the output projection reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "multiversion.h"
#include "products.h"
#include "scratch.h"

namespace levit::tasks {

inline int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// [B, N, H, d] at any strides
template <class T>
struct Projection {
  const T* data;
  int64_t by_image, by_patch, by_head, by_channel;

  const T* at(int64_t image, int64_t head) const { return data + image * by_image + head * by_head; }
};

template <class T>
struct Call {
  int64_t heads, tokens, depth, patches;
  Projection<T> keys, values;
  T* out;  // [B, T, H, d]
  // Of the tokens, the same for every image; scores are for powers of 2, and what pads is 0.
  int64_t lanes, channels;  // tokens and depth in whole vectors
  T *queries, *own_scores;  // [H, d, lanes], [H, lanes]
  T* own_values;            // [H, T, channels]
};

template <class T, int kWidth, int kChannels>
struct Kernel : private Products<T, kWidth> {
  using V = Lanes<T, kWidth>;

  template <int kVectors, class Start, class Finish>
  static LEVIT_INLINE void rows(int64_t count, const Product<T>& of, const Start& start, const Finish& finish) {
    int64_t row = 0;
    Kernel::template blocks<kChannels, kVectors>(row, count, of, nullptr, start, finish);
    Kernel::template blocks<4, kVectors>(row, count, of, nullptr, start, finish);
    Kernel::template blocks<2, kVectors>(row, count, of, nullptr, start, finish);
    Kernel::template blocks<1, kVectors>(row, count, of, nullptr, start, finish);
  }

  // Scores of some tokens, and what softmax makes of them: powers [N, kVectors], the tokens' own powers, and the
  // reciprocals of the sums of both.
  template <int kVectors>
  static LEVIT_INLINE void weigh(const Product<T>& scores, int64_t patches, const T* own_scores, T* powers, T* own,
                                 T* reciprocals) {
    constexpr int64_t kStride = kVectors * kWidth;
    V most[kVectors], total[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) most[v] = load<kWidth>(own_scores + v * kWidth);
    rows<kVectors>(
        patches, scores,
        [&]<int C>(int64_t, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sums[n][v] = V{};
          }
        },
        [&]<int C>(int64_t patch, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              most[v] = sums[n][v] > most[v] ? sums[n][v] : most[v];
              store(powers + (patch + n) * kStride + v * kWidth, sums[n][v]);
            }
          }
        });
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      total[v] = exp2_of_negative<T, kWidth>(load<kWidth>(own_scores + v * kWidth) - most[v]);
      store(own + v * kWidth, total[v]);
    }
    for (int64_t patch = 0; patch < patches; ++patch) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        T* at = powers + patch * kStride + v * kWidth;
        const V power = exp2_of_negative<T, kWidth>(load<kWidth>(at) - most[v]);
        store(at, power);
        total[v] += power;
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(reciprocals + v * kWidth, T(1) / total[v]);
  }

  // out [tokens, depth] = (own own_values + powers^T values) * reciprocals, some channels of it; rows of out are
  // `by_token` apart, of own_values `channels`.
  template <int kVectors>
  static LEVIT_INLINE void mix(const Product<T>& sums_of, int64_t tokens, int64_t depth, const T* own,
                               const T* own_values, int64_t channels, const T* reciprocals, T* out, int64_t by_token) {
    rows<kVectors>(
        tokens, sums_of,
        [&]<int C>(int64_t t, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              sums[n][v] = own[t + n] * load<kWidth>(own_values + (t + n) * channels + v * kWidth);
            }
          }
        },
        [&]<int C>(int64_t t, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              const V mixed = sums[n][v] * reciprocals[t + n];
              T* to = out + (t + n) * by_token + v * kWidth;
              if (depth >= (v + 1) * kWidth) {
                store(to, mixed);
              } else {
                std::memcpy(to, &mixed, (depth - v * kWidth) * sizeof(T));
              }
            }
          }
        });
  }

  // Tokens [first, first + kVectors) of one image and head; values [N, channels] are packed.
  template <int kVectors>
  static LEVIT_INLINE void attend(const Call<T>& call, int64_t image, int64_t head, int64_t first, const T* values,
                                  T* powers) {
    constexpr int64_t kStride = kVectors * kWidth;
    alignas(kAlignment) T own[kStride], reciprocals[kStride];
    const T* queries = call.queries + head * call.depth * call.lanes + first;
    const Product<T> scores{call.keys.at(image, head), call.keys.by_patch, call.keys.by_channel,
                            queries, call.lanes, call.depth};
    weigh<kVectors>(scores, call.patches, call.own_scores + head * call.lanes + first, powers, own, reciprocals);
    const int64_t tokens = std::min(kStride, call.tokens - first), by_token = call.heads * call.depth;
    const T* own_values = call.own_values + (head * call.tokens + first) * call.channels;
    T* out = call.out + (image * call.tokens + first) * by_token + head * call.depth;
    Product<T> sums{powers, 1, kStride, values, call.channels, call.patches};
    for (int64_t c = 0; c < call.channels; c += 2 * kWidth) {
      sums.x = values + c;
      const int64_t depth = call.depth - c;
      if (call.channels - c >= 2 * kWidth) {
        mix<2>(sums, tokens, depth, own, own_values + c, call.channels, reciprocals, out + c, by_token);
      } else {
        mix<1>(sums, tokens, depth, own, own_values + c, call.channels, reciprocals, out + c, by_token);
      }
    }
  }

  // Some of the B * H pairs of an image and a head.
  static LEVIT_INLINE void run(const Call<T>& call, int64_t begin, int64_t end) {
    const auto [values, powers] =
        scratch<T, &Kernel::run>({call.patches * call.channels, call.patches * 2 * kWidth});
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t image = pair / call.heads, head = pair % call.heads;
      const T* from = call.values.at(image, head);
      for (int64_t n = 0; n < call.patches; ++n, from += call.values.by_patch) {
        T* to = values + n * call.channels;
        if (call.values.by_channel == 1) {
          std::memcpy(to, from, call.depth * sizeof(T));
        } else {
          for (int64_t c = 0; c < call.depth; ++c) to[c] = from[c * call.values.by_channel];
        }
        std::fill(to + call.depth, to + call.channels, T(0));
      }
      int64_t t = 0;
      for (; t + kWidth < call.lanes; t += 2 * kWidth) attend<2>(call, image, head, t, values, powers);
      if (t < call.lanes) attend<1>(call, image, head, t, values, powers);
    }
  }
};

}  // namespace levit::tasks
