// The native ops, one prototype each. To add one: declare it here, write cpu/<op>.cpp, register it in module.cpp.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace levit {

using torch::stable::Tensor;

// codes [K, M, L], query [M, L], both float32 or both float64, any strides -> distances [K] (equation 6)
Tensor latent_distance(const Tensor& codes, const Tensor& query);

// features [M, K, N, E] float32, bfloat16 or float64 whose [N, E] are dense, gates [B or 1, K, H or 1] in the type of the
// sums, index int64 [B] or none (B = M) -> [B, N, E] (equation 8)
Tensor dkf_fuse(const Tensor& features, const Tensor& gates, const std::optional<Tensor>& index);

// grad [B, N, E] -> the gates' gradient per image and head [B, K, heads]
Tensor dkf_fuse_gate_gradient(const Tensor& grad, const Tensor& features, const std::optional<Tensor>& index,
                              int64_t heads);

// Ceilings of this machine: GFLOP/s of an fp32 FMA loop and of bfloat16 dot products (0 where the CPU has none), and
// GB/s of one pass over the bytes of buffer (contiguous), each with that many threads of its own.
double fma_peak(int64_t iterations, int64_t threads);
double bf16_dot_peak(int64_t iterations, int64_t threads);
double read_stream(const Tensor& buffer, int64_t threads);

}  // namespace levit
