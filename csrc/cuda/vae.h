// What the kernels of elbo_loss and expansion_distances are told. All tensors are dense.
#pragma once

#include <cstdint>

#include "types.h"

enum LevitLayerName { kHidden1, kHidden2, kMu, kLogSigma, kDecoder1, kDecoder2, kReconstruction, kLayers };

struct LevitLayer {
  const void *weights, *bias;  // [K, inputs, outputs], [K, outputs]
  int32_t inputs, outputs;
};

struct LevitVae {
  const void* images;          // [B, F]
  LevitLayer layers[kLayers];  // of expansion_distances the first four
  const void* noise;           // elbo_loss [S, L], expansion_distances [K, B, L]; null: the mean code
  const void* query;           // expansion_distances: [B, L]
  float* out;                  // elbo_loss [B, K], expansion_distances [K]
  float* partial;              // expansion_distances: [K, levit_expansion_distances_partials(call)]
  int64_t batch;
  int32_t experts, latent, codes;  // S, 1 for the mean code
  float beta;
  int32_t type;                      // LevitType of all but out
  int32_t processors, shared_bytes;  // of the GPU: how many, and how much shared memory a block may have
};

extern "C" {
// Each starts its kernels; 0, or a cudaError_t, or -1 if a block cannot hold these sizes.
int levit_elbo_loss(const LevitVae* call, void* stream);
int levit_expansion_distances(const LevitVae* call, void* stream);
int levit_vae_fits(const LevitVae* call);  // whether a block can
int64_t levit_expansion_distances_partials(const LevitVae* call);
}
