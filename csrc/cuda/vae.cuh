// The MLP VAEs of elbo_loss and expansion_distances. A block takes some images through all layers of one expert:
// activations stay in shared memory, in float, while the weights of layer after layer stream past in two slabs; neither
// codes nor reconstructions are ever written.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "slabs.cuh"
#include "sums.cuh"
#include "vae.h"

namespace levit {

constexpr int kVaeRows = 64;          // images of a block at most
constexpr int kVaeThreadsPerRow = 4;  // 16 that multiply 4 rows at a time; and 4 that sum up one
constexpr float kLogSigmaMin = -8, kLogSigmaMax = 4;

// Lengths in numbers.
struct VaePlan {
  int rows;
  int first_stride, second_stride, latent_stride, image_stride;  // image_stride: of a slab of images
  int image_chunk, chunks[kLayers];
  int shared_bytes;
};

template <class T, int kUsedLayers>
VaePlan plan_vae(const LevitVae& call, int rows) {
  const auto outputs = [&](int layer) { return layer < kUsedLayers ? call.layers[layer].outputs : 0; };
  const auto wider = [](int a, int b) { return (a > b ? a : b) | 1; };  // odd: rows in different banks
  VaePlan plan;
  plan.rows = rows;
  plan.first_stride = wider(outputs(kHidden1), outputs(kDecoder1));
  plan.second_stride = wider(outputs(kHidden2), outputs(kDecoder2));
  plan.latent_stride = call.latent | 1;
  plan.image_stride = kSlabRows + 16 / static_cast<int>(sizeof(T));
  plan.image_chunk = gpu::chunk_of<T>(call.images, call.layers[kHidden1].inputs);
  for (int layer = 0; layer < kUsedLayers; ++layer) {
    plan.chunks[layer] = gpu::chunk_of<T>(call.layers[layer].weights, call.layers[layer].outputs);
  }
  const int64_t floats = plan.first_stride + plan.second_stride + int64_t{3} * plan.latent_stride;
  const int64_t bytes = 4 * rows * floats + 2 * (kSlab + rows * plan.image_stride) * static_cast<int>(sizeof(T));
  plan.shared_bytes = static_cast<int>(bytes < INT32_MAX ? bytes : INT32_MAX);
  return plan;
}

// A slab of a layer's weights, for one of the codes.
struct VaeSlab {
  int layer, code, column, row;
};

// kUsedLayers: kLayers, or kDecoder1 for the encoder alone
template <class T, int kUsedLayers>
class VaeBlock {
 public:
  __device__ __forceinline__ VaeBlock(const LevitVae& of, const VaePlan& p, unsigned char* memory) : call(of), plan(p) {
    slabs = reinterpret_cast<T*>(memory);
    images = slabs + 2 * kSlab;
    first = reinterpret_cast<float*>(images + 2 * plan.rows * plan.image_stride);
    second = first + plan.rows * plan.first_stride;
    mu = second + plan.rows * plan.second_stride;
    log_sigma = mu + plan.rows * plan.latent_stride;
    codes = log_sigma + plan.rows * plan.latent_stride;
    first_image = static_cast<int64_t>(blockIdx.x) * plan.rows;
    expert = blockIdx.y;
  }

  // All layers, for all codes; `errors` gets the sum of squares of this thread's part of its four rows.
  __device__ __forceinline__ void run(float (&errors)[kSide]) {
    VaeSlab slab = {0, 0, 0, 0};
    int now = 0;
    fill(slab, now);
    gpu::commit_copies();
    float sums[kSide][kSide];
    while (slab.layer < kUsedLayers) {
      const VaeSlab next = after(slab);
      gpu::wait_for_copies<0>();
      __syncthreads();  // this slab has come, the other is free, and the layer before is complete
      if (next.layer < kUsedLayers) fill(next, 1 - now);
      gpu::commit_copies();
      if (slab.layer == kDecoder1 && slab.column == 0 && slab.row == 0) {
        sample(slab.code);
        __syncthreads();  // the codes are complete
      }
      const LevitLayer& layer = call.layers[slab.layer];
      const int count = min(kSlabRows, layer.inputs - slab.row);
      if (slab.row == 0) clear(sums);
      const T* const weights = slabs + now * kSlab;
      if (slab.layer == kHidden1) {
        add_slab(images + now * plan.rows * plan.image_stride, plan.image_stride, count, weights, sums);
      } else {
        int stride;
        const float* x = input(slab.layer, stride);
        add_slab(x + slab.row, stride, count, weights, sums);
      }
      if (next.row == 0) finish_columns(slab, sums, errors);
      slab = next;
      now = 1 - now;
    }
  }

  // The column `c` of a row's code: mu + sigma * noise
  __device__ __forceinline__ float code_of(int row, int c, const T* noise) const {
    const int at = row * plan.latent_stride + c;
    return noise ? mu[at] + expf(log_sigma[at]) * gpu::to_float(noise[c]) : mu[at];
  }

  // KL(q || N(0, I)) of a row, by the four threads that share it
  __device__ __forceinline__ float divergence(int row) const {
    float sum = 0;
    for (int c = threadIdx.x % kVaeThreadsPerRow; c < call.latent; c += kVaeThreadsPerRow) {
      const float mean = mu[row * plan.latent_stride + c], log = log_sigma[row * plan.latent_stride + c];
      sum += mean * mean + expf(2 * log) - 1 - 2 * log;
    }
    return 0.5f * sum_of_lanes<kVaeThreadsPerRow>(sum);
  }

  int64_t first_image;
  int expert;

 private:
  __device__ __forceinline__ VaeSlab after(VaeSlab slab) const {
    slab.row += kSlabRows;
    if (slab.row < call.layers[slab.layer].inputs) return slab;
    slab.row = 0;
    slab.column += kSlabColumns;
    if (slab.column < call.layers[slab.layer].outputs) return slab;
    slab.column = 0;
    if (++slab.layer == kLayers && slab.code + 1 < call.codes) {
      ++slab.code;
      slab.layer = kDecoder1;
    }
    return slab;
  }

  __device__ __forceinline__ void fill(const VaeSlab& slab, int which) {
    const LevitLayer& layer = call.layers[slab.layer];
    const T* weights = static_cast<const T*>(layer.weights);
    weights += static_cast<int64_t>(expert) * layer.inputs * layer.outputs;
    const Matrix<T> matrix = {weights, layer.outputs, layer.inputs, layer.outputs, plan.chunks[slab.layer]};
    fill_slab(matrix, slab.row, slab.column, slabs + which * kSlab);
    if (slab.layer != kHidden1) return;
    T* const to = images + which * plan.rows * plan.image_stride;
    const int chunk = plan.image_chunk, of_row = kSlabRows / chunk;
    for (int i = threadIdx.x; i < plan.rows * of_row; i += blockDim.x) {
      const int row = i / of_row, c = i % of_row * chunk;
      const bool copied = first_image + row < call.batch && slab.row + c < layer.inputs;
      const T* from = static_cast<const T*>(call.images);
      if (copied) from += (first_image + row) * layer.inputs + slab.row + c;
      gpu::copy_chunk(to + row * plan.image_stride + c, from, copied, chunk);
    }
  }

  __device__ __forceinline__ const float* input(int layer, int& stride) const {
    const bool of_first = layer == kHidden2 || layer == kDecoder2;
    stride = of_first ? plan.first_stride : layer == kDecoder1 ? plan.latent_stride : plan.second_stride;
    return of_first ? first : layer == kDecoder1 ? codes : second;
  }

  __device__ __forceinline__ void sample(int code) {
    const T* noise = static_cast<const T*>(call.noise);
    if (noise) noise += static_cast<int64_t>(code) * call.latent;
    for (int i = threadIdx.x; i < plan.rows * call.latent; i += blockDim.x) {
      const int row = i / call.latent, c = i % call.latent;
      codes[row * plan.latent_stride + c] = code_of(row, c, noise);
    }
  }

  __device__ __forceinline__ void finish_columns(const VaeSlab& slab, const float (&sums)[kSide][kSide],
                                                 float (&errors)[kSide]) {
    const LevitLayer& layer = call.layers[slab.layer];
    const T* bias = static_cast<const T*>(layer.bias) + static_cast<int64_t>(expert) * layer.outputs;
    const int name = slab.layer, column = slab.column + first_column();
    const bool to_first = name == kHidden1 || name == kDecoder1, to_second = name == kHidden2 || name == kDecoder2;
    float* const to = to_first ? first : to_second ? second : name == kMu ? mu : log_sigma;
    const int stride = to_first ? plan.first_stride : to_second ? plan.second_stride : plan.latent_stride;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (column + j >= layer.outputs) break;
      const float offset = gpu::to_float(bias[column + j]);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        const int row = first_row() + i;
        float sum = sums[i][j] + offset;
        if (name == kReconstruction) {
          if (first_image + row >= call.batch) continue;
          const T* image = static_cast<const T*>(call.images) + (first_image + row) * layer.outputs;
          sum -= gpu::to_float(image[column + j]);
          errors[i] += sum * sum;
          continue;
        }
        // comparisons that let NaN through
        if (name == kDecoder2) sum = sum < 0 ? 0.0f : sum;
        if (name == kLogSigma) sum = sum < kLogSigmaMin ? kLogSigmaMin : sum > kLogSigmaMax ? kLogSigmaMax : sum;
        if (to_first || name == kHidden2) sum = tanhf(sum);
        to[row * stride + column + j] = sum;
      }
    }
  }

  const LevitVae& call;
  const VaePlan& plan;
  T *slabs, *images;
  float *first, *second, *mu, *log_sigma, *codes;
};

template <class T>
__global__ void __launch_bounds__(kVaeRows* kVaeThreadsPerRow)
    elbo_loss(const __grid_constant__ LevitVae call, const __grid_constant__ VaePlan plan) {
  LEVIT_SHARED(memory);
  VaeBlock<T, kLayers> block(call, plan, memory);
  float errors[kSide] = {};
  block.run(errors);
  // The 16 threads of four rows are also the four threads of each of them.
  const int row = threadIdx.x / kVaeThreadsPerRow;
  float error = 0;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const float sum = sum_of_lanes<16>(errors[i]);
    if (row % kSide == i) error = sum;
  }
  const float divergence = block.divergence(row);
  const int64_t image = block.first_image + row;
  if (threadIdx.x % kVaeThreadsPerRow == 0 && image < call.batch) {
    call.out[image * call.experts + block.expert] = error / static_cast<float>(call.codes) + call.beta * divergence;
  }
}

// A warp's partial sum: the distances of its images.
template <class T>
__global__ void __launch_bounds__(kVaeRows* kVaeThreadsPerRow)
    expansion_distances(const __grid_constant__ LevitVae call, const __grid_constant__ VaePlan plan) {
  LEVIT_SHARED(memory);
  VaeBlock<T, kDecoder1> block(call, plan, memory);
  float none[kSide] = {};
  block.run(none);
  __syncthreads();  // the codes are complete
  const int row = threadIdx.x / kVaeThreadsPerRow;
  const int64_t image = block.first_image + row;
  float sum = 0;
  if (image < call.batch) {
    const T* query = static_cast<const T*>(call.query) + image * call.latent;
    const T* noise = static_cast<const T*>(call.noise);
    if (noise) noise += (block.expert * call.batch + image) * call.latent;
    for (int c = threadIdx.x % kVaeThreadsPerRow; c < call.latent; c += kVaeThreadsPerRow) {
      const float apart = block.code_of(row, c, noise) - gpu::to_float(query[c]);
      sum += apart * apart;
    }
  }
  const float distance = sqrtf(sum_of_lanes<kVaeThreadsPerRow>(sum));
  const float total = sum_of_lanes<32>(threadIdx.x % kVaeThreadsPerRow == 0 ? distance : 0.0f);
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) {
    call.partial[(static_cast<int64_t>(block.expert) * gridDim.x + blockIdx.x) * warps + threadIdx.x / 32] = total;
  }
}

}  // namespace levit
