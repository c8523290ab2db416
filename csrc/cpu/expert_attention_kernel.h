// The kernel of expert_attention for one vector width. Tokens are the lanes of the vectors: activations lie channel by
// channel, [channels][tokens], and weights are broadcast. So no number of channels needs padding, weights are read
// where they lie without being packed, q k^T is an outer product, and the softmax never runs across lanes. In bfloat16 a
// lane holds a word of two channels, what passes from one product to the next is rounded, and all else is float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "expert_attention_call.h"
#include "lanes.h"
#include "multiversion.h"
#include "products.h"
#include "scratch.h"

namespace levit::attention {

constexpr int64_t kMaxVectors = 8;           // token vectors of a tile: enough to fill lanes with images of any length
constexpr int64_t kChunkElements = 1 << 17;  // patches and sums of the images that go through all experts: half an L2

// How many images share a tile: vectors go in pairs through the projections, and few of their lanes should be idle.
inline int64_t images_per_tile(int64_t tokens, int64_t lanes) {
  int64_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t images = 1; images == 1 || images * tokens <= kMaxVectors * lanes; ++images) {
    const int64_t vectors = (images * tokens + lanes - 1) / lanes;
    const double cost = (vectors + 0.3 * (vectors % 2)) / images;
    if (cost < 0.98 * least) {
      best = images;
      least = cost;
    }
  }
  return best;
}

template <class T, int kWidth, int kChannels>
struct Kernel : private Products<T, kWidth> {
  using Number = Words<T, kWidth>;
  using Word = typename Number::Word;
  using Sum = typename Number::Sum;
  using V = typename Number::V;
  static constexpr int kInputs = Number::kInputs;

  static constexpr int64_t words(int64_t channels) { return (channels + kInputs - 1) / kInputs; }

  // out from channel c on = sums: as they are, channel by channel, or in words, as another projection takes them in
  template <int C, int kVectors, class Out>
  static LEVIT_INLINE void keep(const V (&sums)[C][kVectors], int64_t c, Out* out, int64_t stride) {
    constexpr int kStep = std::is_same_v<Out, Word> ? kInputs : 1;
#pragma GCC unroll 16
    for (int n = 0; n < C; n += kStep) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Out* at = out + (c + n) / kStep * stride + v * kWidth;
        if constexpr (std::is_same_v<Out, Sum>) {
          store(at, sums[n][v]);
        } else if constexpr (kStep == 1) {
          store(at, Number::narrow(sums[n][v]));
        } else {
          const V pair[kStep] = {sums[n][v], n + 1 < C ? sums[n + 1][v] : V{}};
          store(at, Number::join(pair));
        }
      }
    }
  }

  // out [channels, tokens] = LeakyReLU(w [channels, inputs] x [inputs, tokens] + bias); slope 1 leaves it linear
  template <int kVectors, class Out>
  static LEVIT_INLINE void project_vectors(const Product<T>& of, const Sum* bias, int64_t channels, Sum slope, Out* out,
                                           const T* after) {
    Kernel::template all_channels<kChannels, kVectors>(
        channels, of, after,
        FromBias<Sum>{bias},
        [&]<int C>(int64_t c, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
          if (slope != 1) {
#pragma GCC unroll 16
            for (int n = 0; n < C; ++n) {
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) sums[n][v] = sums[n][v] > 0 ? sums[n][v] : sums[n][v] * slope;
            }
          }
          keep(sums, c, out, of.stride);
        });
  }

  template <class Out>
  static LEVIT_INLINE void project(Product<T> of, const Sum* bias, int64_t channels, Sum slope, Out* out,
                                   const T* after) {
    const Word* end = of.x + of.stride;
    for (; of.x + 2 * kWidth <= end; of.x += 2 * kWidth, out += 2 * kWidth) {
      project_vectors<2>(of, bias, channels, slope, out, after);
    }
    if (of.x < end) project_vectors<1>(of, bias, channels, slope, out, after);
  }

  // `after` is where the weights of the next projection begin.
  template <class Out>
  static LEVIT_INLINE void project(const Weights<T>& weights, const T* w, const Sum* bias, int64_t channels,
                                   const Word* x, int64_t inputs, int64_t stride, Sum slope, Out* out, const T* after) {
    if (kInputs > 1 || weights.by_input == 1) {
      project({w, weights.by_channel, kInputs, x, stride, inputs}, bias, channels, slope, out, after);
    } else {
      project({w, 1, weights.by_input, x, stride, inputs}, bias, channels, slope, out, after);
    }
  }

  // to [d, padded] (+)= gate * softmax(q k^T / sqrt(d)) v of one image and head; q, k are words of [inner, stride], v is
  // [d, stride].
  static LEVIT_INLINE void attend(const Word* q, const Word* k, const T* v, int64_t stride, int64_t tokens,
                                  int64_t inner, int64_t depth, Sum gate, bool add, Sum* scores, Sum* to,
                                  int64_t padded) {
    const Sum scale = static_cast<Sum>(1.44269504088896340736 / std::sqrt(static_cast<double>(depth)));  // for powers of 2
    const auto zero = []<int C>(int64_t, V(&sums)[C][1]) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int n = 0; n < C; ++n) sums[n][0] = V{};
    };
    for (int64_t t = 0; t < tokens; t += kWidth) {
      constexpr int kKeys = kChannels == 12 ? 16 : kChannels;
      const T* keys = reinterpret_cast<const T*>(k);
      const Product<T> products{keys, kInputs, kInputs * stride, q + t, stride, words(inner) * kInputs};
      Kernel::template all_channels<kKeys, 1>(
          tokens, products, nullptr, zero, [&]<int C>(int64_t key, V(&sums)[C][1]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int n = 0; n < C; ++n) store(scores + (key + n) * kWidth, sums[n][0]);
          });
      V most = load<kWidth>(scores);
      for (int64_t key = 1; key < tokens; ++key) {
        const V score = load<kWidth>(scores + key * kWidth);
        most = score > most ? score : most;
      }
      V total{};
      Word* powers = reinterpret_cast<Word*>(scores);  // words of keys, in place
      for (int64_t key = 0; key < tokens; key += kInputs) {
        V power[kInputs] = {};
#pragma GCC unroll 2
        for (int n = 0; n < kInputs; ++n) {
          if (key + n == tokens) break;
          power[n] = exp2_of_negative<Sum, kWidth>((load<kWidth>(scores + (key + n) * kWidth) - most) * scale);
          total += power[n];
        }
        store(powers + key / kInputs * kWidth, Number::join(power));
      }
      const V weight = gate / total;
      const Product<T> heads{v, stride, kInputs, powers, kWidth, tokens};
      Kernel::template all_channels<kChannels, 1>(
          depth, heads, nullptr, zero, [&]<int C>(int64_t c, V(&sums)[C][1]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int n = 0; n < C; ++n) {
              Sum* at = to + (c + n) * padded + t;
              V sum = sums[n][0] * weight;
              if (add) sum += load<kWidth>(at);
              store(at, sum);
            }
          });
    }
  }

  // out [tokens, features] = sums [features, padded], transposed; narrowed, unless sums are wanted
  template <class Out>
  static LEVIT_INLINE void write(const Sum* sums, int64_t features, int64_t tokens, int64_t padded, Out* out) {
    const int64_t side = std::min<int64_t>(features, kWidth);
    for (int64_t t = 0; t < tokens; t += kWidth) {
      for (int64_t next = 0; next < features; next += kWidth) {
        const int64_t c = std::min(next, features - side);  // the last square may overlap the one before
        V square[kWidth];
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) square[r] = r < side ? load<kWidth>(sums + (c + r) * padded + t) : V{};
        transpose(square);
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) {
          if (t + r == tokens) break;
          Out* to = out + (t + r) * features + c;
          if constexpr (std::is_same_v<Out, Sum>) {
            put(square[r], side, to);
          } else {
            put(Number::narrow(square[r]), side, to);
          }
        }
      }
    }
  }

  template <class Numbers, class Out>
  static LEVIT_INLINE void put(const Numbers& numbers, int64_t count, Out* out) {
    if (count == kWidth) {
      store(out, numbers);
    } else {
      std::memcpy(out, &numbers, count * sizeof(Out));
    }
  }

  // Where the parts of one chunk's work lie in the scratch memory.
  struct Room {
    Word *patches, *x, *z, *qkv;
    Sum *scores, *sums;
  };

  // One expert on some images of the chunk that begins at image `first`: of its patches [images, P, N] and sums
  // [images, E, padded].
  static LEVIT_INLINE void evaluate(const Call<T>& call, int64_t k, int64_t first, const int64_t* images, int64_t count,
                                    const Room& room) {
    const int64_t tokens = call.tokens, stride = round_up(count * tokens, kWidth), padded = round_up(tokens, kWidth);
    const int64_t pixels = words(call.pixels);
    for (int64_t p = 0; p < pixels; ++p) {  // a store may run into the next image, which comes after it
      for (int64_t i = 0; i < count; ++i) {
        const Word* from = room.patches + ((images[i] - first) * pixels + p) * tokens;
        for (int64_t t = 0; t < tokens; t += kWidth) {
          store(room.x + p * stride + i * tokens + t, load<kWidth>(from + t));
        }
      }
    }
    const int64_t depth = call.depth, inner = call.query_depth(), section = call.features();
    Word *queries = room.qkv, *keys = call.folded ? room.z : queries + words(inner) * stride;
    T* values = reinterpret_cast<T*>(call.folded ? queries + words(inner) * stride : keys + words(depth) * stride);
    project(call.w_embed, call.w_embed.at(k, 0), call.b_embed + k * call.width, call.width, room.x, call.pixels, stride,
            call.negative_slope, room.z, call.queries.weights.at(k, 0));
    const auto project_tokens = [&](const Projection<T>& by, int64_t row, int64_t channels, auto* to,
                                    const T* after) __attribute__((always_inline)) {
      project(by.weights, by.weights.at(k, row), by.bias_at(k, row), channels, room.z, call.width, stride, Sum(1), to, after);
    };
    for (int64_t h = 0; h < call.heads; ++h) {
      bool used = false;
      for (int64_t i = 0; i < count; ++i) used = used || call.gate(images[i], k, h) != 0;
      if (!used) continue;
      const T *of_keys = call.keys.weights.at(k, h * depth), *of_values = call.values.weights.at(k, h * depth);
      project_tokens(call.queries, h * inner, inner, queries, call.folded ? of_values : of_keys);
      if (!call.folded) project_tokens(call.keys, h * depth, depth, keys, of_values);
      project_tokens(call.values, h * depth, depth, values, call.queries.weights.at(k, (h + 1) % call.heads * inner));
      for (int64_t i = 0; i < count; ++i) {
        const Sum gate = call.gate(images[i], k, h);
        if (call.gates && gate == 0) continue;
        const int64_t at = call.gates ? images[i] - first : i;
        attend(queries + i * tokens, keys + i * tokens, values + i * tokens, stride, tokens, inner, depth, gate,
               call.gates, room.scores, room.sums + (at * section + h * depth) * padded, padded);
      }
    }
    if (call.gates) return;
    for (int64_t i = 0; i < count; ++i) {
      write(room.sums + i * section * padded, section, tokens, padded,
            call.out + k * call.out_by_expert + images[i] * call.out_by_image);
    }
  }

  // Some experts on some images, chunk after chunk; in a chunk one expert after the other, so that its weights stay in
  // L2. With gates the sum goes to out [B, N, E], dense.
  static LEVIT_INLINE void run(const Call<T>& call, Range images, Range experts, Sum* out) {
    const int64_t tokens = call.tokens, padded = round_up(tokens, kWidth), features = call.features();
    const int64_t together = images_per_tile(tokens, kWidth), lanes = round_up(together * tokens, kWidth);
    const int64_t pixels = words(call.pixels), of_image = pixels * tokens + features * padded;
    const int64_t most = round_up(std::max<int64_t>(1, kChunkElements / of_image), together);
    const int64_t chunk = std::min(images.size(), most);
    const int64_t kept = call.gates ? chunk : together;
    static thread_local Scratch scratch;
    Room room;
    static_assert(sizeof(Word) == sizeof(Sum));
    const int64_t sizes[] = {chunk * pixels * tokens + kWidth, pixels * lanes + kWidth, words(call.width) * lanes,
                             (words(call.query_depth()) + words(call.depth) + call.depth) * lanes + padded,
                             tokens * kWidth, kept * features * padded};
    int64_t begin[7] = {};
    for (int part = 0; part < 6; ++part) begin[part + 1] = begin[part] + round_up(sizes[part], kAlignment / sizeof(Sum));
    Word* memory = static_cast<Word*>(scratch.get(begin[6] * sizeof(Word)));
    room.patches = memory;
    room.x = memory + begin[1];
    room.z = memory + begin[2];
    room.qkv = memory + begin[3];
    room.scores = reinterpret_cast<Sum*>(memory + begin[4]);
    room.sums = reinterpret_cast<Sum*>(memory + begin[5]);
    std::vector<int64_t> users(chunk);
    for (int64_t first = images.begin; first < images.end; first += chunk) {
      const int64_t end = std::min(first + chunk, images.end);
      for (int64_t b = first; b < end; ++b) {
        const T* from = call.patches + b * call.image_stride;
        T* to = reinterpret_cast<T*>(room.patches + (b - first) * pixels * tokens);
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t p = 0; p < pixels * kInputs; ++p) {
            to[(p / kInputs * tokens + t) * kInputs + p % kInputs] =
                p < call.pixels ? from[t * call.token_stride + p * call.pixel_stride] : T{};
          }
        }
      }
      if (call.gates) std::fill(room.sums, room.sums + (end - first) * features * padded, Sum(0));
      for (int64_t k = experts.begin; k < experts.end; ++k) {
        int64_t count = 0;
        for (int64_t b = first; b < end; ++b) {
          if (call.uses(b, k)) users[count++] = b;
        }
        for (int64_t i = 0; i < count; i += together) {
          evaluate(call, k, first, users.data() + i, std::min(together, count - i), room);
        }
      }
      if (!call.gates) continue;
      for (int64_t b = first; b < end; ++b) {
        write(room.sums + (b - first) * features * padded, features, tokens, padded, out + b * tokens * features);
      }
    }
  }
};

}  // namespace levit::attention
