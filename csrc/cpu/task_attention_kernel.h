// The kernel of task_attention for one vector width: a few images from their patches to the output, so that keys,
// values and the heads' sums never leave the cache. Tokens are the lanes of the scores, as all images share the
// queries: these are turned around once, the keys are broadcast from where their projection left them, and the softmax
// never runs across lanes. For the sums the lanes are the channels of the values, so that they leave in the order in
// which the output projection reads them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "multiversion.h"
#include "panels.h"
#include "products.h"
#include "scratch.h"

namespace levit::tasks {

// y [rows, size] = bias + x [rows, size] panels, for this width of vectors; rows of y are by_row apart
template <class T>
using Dense = void (*)(const Matrix<T>& x, int64_t rows, const T* panels, int64_t size, const T* bias, T* y,
                       int64_t by_row);

template <class T>
struct Call {
  Dense<T> dense;  // not inlined three times
  int64_t heads, tokens, depth, patches;
  const T* images;  // [B, N, D] at any strides
  int64_t by_image, by_patch, by_channel;
  T* out;            // [B, T, D]
  int64_t together;  // images at a time, at most
  // Of the tokens, the same for every image; scores are for powers of 2, and what pads is 0.
  int64_t lanes, channels;  // tokens and depth in whole vectors
  const T *queries, *own_scores;  // [H, d, lanes], [H, lanes]
  const T* own_values;            // [H, T, channels]
  const T *wk, *wv, *wo;          // panels
  const T *no_bias, *bo;          // [D] in whole vectors

  int64_t width() const { return heads * depth; }
};

template <class T, int kWidth, int kChannels>
struct Kernel {
  using V = Lanes<T, kWidth>;
  using Blocks = Rows<T, kWidth, kChannels>;

  // Scores of some tokens, and what softmax makes of them: powers [N, kVectors], the tokens' own powers, and the
  // reciprocals of the sums of both.
  template <int kVectors>
  static LEVIT_INLINE void weigh(const Product<T>& scores, int64_t patches, const T* own_scores, T* powers, T* own,
                                 T* reciprocals) {
    constexpr int64_t kStride = kVectors * kWidth;
    V most[kVectors], total[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) most[v] = load<kWidth>(own_scores + v * kWidth);
    Blocks::template each<kVectors>(
        patches, scores,
        FromZero{},
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
    Blocks::template each<kVectors>(
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
              T* to = out + (t + n) * by_token + v * kWidth;
              store_part(to, sums[n][v] * reciprocals[t + n], depth - v * kWidth);
            }
          }
        });
  }

  // Tokens [first, first + kVectors) of one image and head: keys and values [N, stride] -> out [T, stride]. Vectors of
  // values may reach beyond the head: nothing is done across lanes, and what they hold there is not stored.
  template <int kVectors>
  static LEVIT_INLINE void attend(const Call<T>& call, int64_t head, int64_t first, const T* keys, const T* values,
                                  int64_t stride, T* powers, T* out) {
    constexpr int64_t kStride = kVectors * kWidth;
    alignas(kAlignment) T own[kStride], reciprocals[kStride];
    const T* queries = call.queries + head * call.depth * call.lanes + first;
    const Product<T> scores{keys, stride, 1, queries, call.lanes, call.depth};
    weigh<kVectors>(scores, call.patches, call.own_scores + head * call.lanes + first, powers, own, reciprocals);
    const int64_t tokens = std::min(kStride, call.tokens - first);
    const T* own_values = call.own_values + (head * call.tokens + first) * call.channels;
    out += first * stride;
    Product<T> sums{powers, 1, kStride, values, stride, call.patches};
    for (int64_t c = 0; c < call.channels; c += 2 * kWidth) {
      sums.x = values + c;
      const int64_t depth = call.depth - c;
      if (call.channels - c >= 2 * kWidth) {
        mix<2>(sums, tokens, depth, own, own_values + c, call.channels, reciprocals, out + c, stride);
      } else {
        mix<1>(sums, tokens, depth, own, own_values + c, call.channels, reciprocals, out + c, stride);
      }
    }
  }

  // From row to row: room for the vectors that reach beyond the last head, and an odd number of vectors, as rows that
  // are a multiple of many cache lines apart would fall into a few sets of a cache.
  static int64_t stride_of(const Call<T>& call) { return (((call.width() + kWidth - 1) / kWidth + 1) | 1) * kWidth; }

  // The patches of some images as rows: where they lie, or a copy.
  static LEVIT_INLINE Matrix<T> rows_of(const Call<T>& call, int64_t first, int64_t images, T* copy) {
    const T* from = call.images + first * call.by_image;
    if (call.by_channel == 1 && (images == 1 || call.by_image == call.patches * call.by_patch)) {
      return {from, call.by_patch, 1};
    }
    const int64_t width = call.width();
    T* to = copy;
    for (int64_t image = 0; image < images; ++image) {
      for (int64_t n = 0; n < call.patches; ++n, to += width) {
        const T* patch = from + image * call.by_image + n * call.by_patch;
        for (int64_t c = 0; c < width; ++c) to[c] = patch[c * call.by_channel];
      }
    }
    return {copy, width, 1};
  }

  // As many images as are taken together, or fewer.
  static LEVIT_INLINE void run(const Call<T>& call, int64_t first, int64_t images) {
    const int64_t stride = stride_of(call), width = call.width();
    const int64_t patches = call.together * call.patches, tokens = call.together * call.tokens;
    const auto [copy, keys, values, heads, powers] = scratch<T, &Kernel::run>(
        {patches * width, patches * stride, patches * stride, tokens * stride, call.patches * 2 * kWidth});
    const Matrix<T> rows = rows_of(call, first, images, copy);
    call.dense(rows, images * call.patches, call.wk, width, call.no_bias, keys, stride);
    call.dense(rows, images * call.patches, call.wv, width, call.no_bias, values, stride);
    for (int64_t pair = 0; pair < images * call.heads; ++pair) {
      const int64_t image = pair / call.heads, head = pair % call.heads;
      const int64_t from = image * call.patches * stride + head * call.depth;
      T* to = heads + image * call.tokens * stride + head * call.depth;
      int64_t t = 0;
      for (; t + kWidth < call.lanes; t += 2 * kWidth) {
        attend<2>(call, head, t, keys + from, values + from, stride, powers, to);
      }
      if (t < call.lanes) attend<1>(call, head, t, keys + from, values + from, stride, powers, to);
    }
    call.dense({heads, stride, 1}, images * call.tokens, call.wo, width, call.bo,
               call.out + first * call.tokens * width, width);
  }
};

}  // namespace levit::tasks
