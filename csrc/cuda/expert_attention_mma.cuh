// expert_attention on tensor cores, for images of at most 16 tokens: the tokens of an image are the rows of one tile, a
// warp does one head of one image, and from the queries to the gated sum everything stays in its registers.
//
// Widths are padded to tiles of 8 where they are columns and to steps of 16 where they are summed over: 100 to 104 and
// 112. The weights of all heads stream through a ring of slots in shared memory, shared by the images of the block; the
// copies run ahead across experts, so the next expert's weights are under way while this one's are used.
#pragma once

#include <cstdint>

#include "copies.h"
#include "expert_attention.h"
#include "gpu.h"
#include "mma_tiles.cuh"
#include "used_experts.cuh"

namespace levit {

constexpr int kTile = 16;  // tokens of an image
constexpr int kSlots = 3;

// Lengths in numbers. Distances of rows are odd multiples of 16 bytes: ldmatrix then meets no bank twice.
struct MmaPlan {
  int images;       // of a block
  int pixel_steps;  // of 16
  int embed_stages, stages;
  int patch_stride, token_stride, weight_stride, slot;
  int patch_chunk, embed_chunk, qkv_chunk;
  int shared_bytes;
};

// kSteps: 16 kSteps >= width; kTiles: 8 kTiles >= depth
template <int kSteps, int kTiles>
struct MmaStages {
  static constexpr int kScores = (kTiles + 1) / 2, kValues = (kTiles + 3) / 4;
  // Pairs of column tiles of the embedding that a warp takes on, so two heads must share them
  static constexpr int kPairs = (kSteps + 1) / 2;
  static constexpr int kMaxWarps = kTiles > 13 ? 8 : 12;  // 255 or 168 registers for each of their threads
};

template <class T, int kSteps, int kTiles>
MmaPlan plan_mma(const LevitExpertAttention& call, int images) {
  using Stages = MmaStages<kSteps, kTiles>;
  MmaPlan plan;
  plan.images = images;
  plan.pixel_steps = (call.pixels + 15) / 16;
  plan.embed_stages = (plan.pixel_steps + kSteps - 1) / kSteps;
  plan.stages = plan.embed_stages + Stages::kScores + Stages::kValues;
  plan.patch_stride = 16 * plan.pixel_steps + 8;
  plan.token_stride = 16 * kSteps + 8;
  plan.weight_stride = (2 * call.heads > kSteps ? 32 * call.heads : 16 * kSteps) + 8;
  plan.slot = 16 * kSteps * plan.weight_stride;
  plan.patch_chunk = gpu::chunk_of<T>(call.patches, call.pixels);
  plan.embed_chunk = gpu::chunk_of<T>(call.w_embed, call.width);
  plan.qkv_chunk = gpu::chunk_of<T>(call.w_qkv, call.depth);
  const int numbers = images * kTile * (plan.patch_stride + plan.token_stride) + kSlots * plan.slot;
  plan.shared_bytes = numbers * static_cast<int>(sizeof(T)) + call.experts * static_cast<int>(sizeof(int));
  return plan;
}

// Starts the copies of one stage's weights into a slot: rows of the inputs; the columns are those of the embedding, or
// for each head 16 of its queries' and 16 of its keys', or 32 of its values'.
template <class T, int kSteps, int kTiles>
__device__ __forceinline__ void fill_slot(const LevitExpertAttention& call, const MmaPlan& plan, int expert, int stage,
                                          T* slot) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int values = plan.stages - MmaStages<kSteps, kTiles>::kValues;
  const bool embeds = stage < plan.embed_stages, scores = stage < values;
  const int part = scores ? stage - plan.embed_stages : stage - values;
  const int first = embeds ? stage * kSteps * 16 : 0;
  const int inputs = embeds ? call.pixels : call.width, outputs = embeds ? call.width : 3 * call.heads * call.depth;
  const int rows = embeds ? 16 * min(kSteps, plan.pixel_steps - stage * kSteps) : 16 * kSteps, valid = inputs - first;
  const int columns = embeds ? kSteps * 16 : call.heads * 32, chunk = embeds ? plan.embed_chunk : plan.qkv_chunk;
  const T* weights = static_cast<const T*>(embeds ? call.w_embed : call.w_qkv);
  weights += (static_cast<int64_t>(expert) * inputs + first) * outputs;
  for (int c = lane * chunk; c < columns; c += 32 * chunk) {
    const int head = c / 32, within = c % 32;
    const int of_head = scores ? part * 16 + within % 16 : part * 32 + within;
    const int source = embeds ? c : ((scores ? within / 16 : 2) * call.heads + head) * call.depth + of_head;
    const bool exists = embeds ? c < call.width : of_head < call.depth;
    for (int row = warp; row < rows; row += warps) {
      const bool copied = exists && row < valid;
      const T* from = weights + (copied ? row * outputs + source : 0);
      gpu::copy_chunk(slot + row * plan.weight_stride + c, from, copied, chunk);
    }
  }
}

// Starts the copies of a block's images, with zeros for what is no token; they are part of the first stage's.
template <class T>
__device__ __forceinline__ void load_patches(const LevitExpertAttention& call, const MmaPlan& plan, int64_t first_image,
                                             T* patches) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int row = warp; row < plan.images * kTile; row += blockDim.x / 32) {
    const int64_t of = first_image + row / kTile;
    const bool exists = of < call.batch && row % kTile < call.tokens;
    const T* from = static_cast<const T*>(call.patches);
    if (exists) from += (of * call.tokens + row % kTile) * call.pixels;
    for (int c = lane * plan.patch_chunk; c < plan.pixel_steps * 16; c += 32 * plan.patch_chunk) {
      const bool copied = exists && c < call.pixels;
      gpu::copy_chunk(patches + row * plan.patch_stride + c, from + (copied ? c : 0), copied, plan.patch_chunk);
    }
  }
}

template <class T, class Out, int kSteps, int kTiles>
__global__ void __launch_bounds__(32 * MmaStages<kSteps, kTiles>::kMaxWarps)
    expert_attention_mma(const LevitExpertAttention call, const MmaPlan plan) {
  using Stages = MmaStages<kSteps, kTiles>;
  LEVIT_SHARED(memory);
  T* const patches = reinterpret_cast<T*>(memory);  // [images, 16, patch_stride]
  T* const tokens = patches + plan.images * kTile * plan.patch_stride;
  T* const slots = tokens + plan.images * kTile * plan.token_stride;
  int* const used = reinterpret_cast<int*>(slots + kSlots * plan.slot);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = warp % call.heads, own = warp / call.heads;  // the image within the block
  const int64_t first_image = static_cast<int64_t>(blockIdx.x) * plan.images, image = first_image + own;
  const int begin = call.gates.data ? 0 : blockIdx.y, end = call.gates.data ? call.experts : begin + 1;

  for (int expert = begin + threadIdx.x; expert < end; expert += blockDim.x) {
    used[expert] = is_used(call, first_image, plan.images, expert);
  }
  __syncthreads();  // who is used

  int ahead_expert = next_used(used, begin, end), ahead_stage = 0, slot = 0;
  if (ahead_expert < end) load_patches(call, plan, first_image, patches);
  const auto fill_next = [&](int into) {
    if (ahead_expert < end) {
      fill_slot<T, kSteps, kTiles>(call, plan, ahead_expert, ahead_stage, slots + into * plan.slot);
      if (++ahead_stage == plan.stages) {
        ahead_stage = 0;
        ahead_expert = next_used(used, ahead_expert + 1, end);
      }
    }
    gpu::commit_copies();
  };
  // The weights of the next stage. Everybody has left the stage before: its slot is filled anew.
  const auto next_weights = [&]() -> const T* {
    gpu::wait_for_copies<kSlots - 2>();
    __syncthreads();
    fill_next(slot == 0 ? kSlots - 1 : slot - 1);
    const T* weights = slots + slot * plan.slot;
    slot = slot + 1 == kSlots ? 0 : slot + 1;
    return weights;
  };
  for (int i = 0; i < kSlots - 1; ++i) fill_next(i);

  float out[kTiles][4] = {};
  const T* const own_patches = patches + (own * kTile + lane % 16) * plan.patch_stride + lane / 16 * 8;
  T* const own_tokens = tokens + own * kTile * plan.token_stride;
  // The heads of an image share its embedding: of the pairs of column tiles these are this warp's.
  const int first_pair = head * kSteps / call.heads, pairs = (head + 1) * kSteps / call.heads - first_pair;
  for (int expert = next_used(used, begin, end); expert < end; expert = next_used(used, expert + 1, end)) {
    {
      float sums[Stages::kPairs][2][4];
      const T* const bias = static_cast<const T*>(call.b_embed) + static_cast<int64_t>(expert) * call.width;
#pragma unroll
      for (int i = 0; i < Stages::kPairs; ++i) start_from_bias(bias, (first_pair + i) * 16, call.width, sums[i]);
      for (int stage = 0; stage < plan.embed_stages; ++stage) {
        const T* weights = next_weights() + lane % 16 * plan.weight_stride + lane / 16 * 8 + first_pair * 16;
        const int steps = min(kSteps, plan.pixel_steps - stage * kSteps);
        for (int step = 0; step < steps; ++step) {
          uint32_t a[1][4], b[4];
          gpu::load_rows(a[0], own_patches + (stage * kSteps + step) * 16);
#pragma unroll
          for (int i = 0; i < Stages::kPairs; ++i) {
            if (i < pairs) {
              gpu::load_transposed(b, weights + step * 16 * plan.weight_stride + i * 16);
              gpu::multiply<T>(sums[i][0], a[0], b[0], b[1]);
              gpu::multiply<T>(sums[i][1], a[0], b[2], b[3]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < Stages::kPairs; ++i) {
        if (i >= pairs) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // tile, then half of its rows
          float first = sums[i][j / 2][j % 2 * 2], second = sums[i][j / 2][j % 2 * 2 + 1];
          first = first > 0 ? first : first * call.slope;
          second = second > 0 ? second : second * call.slope;
          const int row = lane / 4 + j % 2 * 8, column = (first_pair + i) * 16 + j / 2 * 8 + lane % 4 * 2;
          *reinterpret_cast<uint32_t*>(own_tokens + row * plan.token_stride + column) = gpu::pack<T>(first, second);
        }
      }
    }
    const float gate = image < call.batch ? gate_of(call.gates, image, expert, head) : 0.0f;
    const int features = call.heads * call.depth, distance = plan.weight_stride;
    const T* const query_bias = static_cast<const T*>(call.b_qkv) + expert * 3LL * features + head * call.depth;
    const T *const key_bias = query_bias + features, *const value_bias = key_bias + features;
    uint32_t rows[kSteps][4];
    float scores[2][4] = {};
    for (int stage = 0; stage < Stages::kScores; ++stage) {
      const T* weights = next_weights() + head * 32;
      if (gate == 0.0f) continue;  // whatever the expert computes
      if (stage == 0) {  // the barrier of the stage has shown all heads' columns of the tokens
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          gpu::load_rows(rows[step], own_tokens + lane % 16 * plan.token_stride + step * 16 + lane / 16 * 8);
        }
      }
      if (kTiles % 2 == 0 || stage + 1 < Stages::kScores) {
        add_scores<T, kSteps, 2>(rows, weights, distance, query_bias, key_bias, stage * 16, call.depth, scores);
      } else {
        add_scores<T, kSteps, 1>(rows, weights, distance, query_bias, key_bias, stage * 16, call.depth, scores);
      }
    }
    uint32_t powers[4] = {};
    float share[2] = {};
    if (gate != 0.0f) softmax<T>(scores, call.tokens, call.depth, gate, powers, share);
    for (int stage = 0; stage < Stages::kValues; ++stage) {
      const T* weights = next_weights() + head * 32;
      if (gate == 0.0f) continue;
#pragma unroll
      for (int pair = 0; pair < Stages::kScores; ++pair) {  // registers have no index: each pair waits for its stage
        if (pair / 2 != stage) continue;
        const T* of_pair = weights + pair % 2 * 16;
        if (kTiles % 2 == 0 || pair + 1 < Stages::kScores) {
          add_values<T, kSteps, 2>(rows, of_pair, distance, value_bias, pair * 16, call.depth, powers, share,
                                   out + 2 * pair);
        } else {
          add_values<T, kSteps, 1>(rows, of_pair, distance, value_bias, pair * 16, call.depth, powers, share,
                                   out + 2 * pair);
        }
      }
    }
  }

  if (image >= call.batch) return;
  const int64_t row_of = (static_cast<int64_t>(blockIdx.y) * call.batch + image) * call.tokens;
  const int features = call.heads * call.depth;
  Out* const to = static_cast<Out*>(call.out) + row_of * features + head * call.depth;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = tile * 8 + lane % 4 * 2 + i % 2;
      if (row < call.tokens && column < call.depth) {
        to[static_cast<int64_t>(row) * features + column] = gpu::from_float<Out>(out[tile][i]);
      }
    }
  }
}

}  // namespace levit
