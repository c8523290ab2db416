// The MLP VAEs of K experts (SPEC.md): what elbo_loss and vae_codes share.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dense_layer.h"
#include "scratch.h"

namespace levit {

constexpr double kLogSigmaMin = -8, kLogSigmaMax = 4;

template <class T>
struct Encoder {
  Layer<T> first, second, to_mu, to_log_sigma;
  int64_t pixels() const { return first.in; }
  int64_t latent() const { return to_mu.out; }
  bool follows() const {
    return second.in == first.out && to_mu.in == second.out && to_log_sigma.in == second.out &&
           to_log_sigma.out == to_mu.out;
  }
};

// images -> mu and the clamped log sigma of expert k, all in one layout; W is the type of the weights
template <class W, class T = typename Layer<W>::Sum>
void encode(const Encoder<W>& by, int64_t k, const T* images, const Layout<T>& layout, T* mu, T* log_sigma) {
  const auto [hidden1, hidden2] =
      scratch<T, &encode<W>>({layout.rows * by.first.out, layout.rows * by.second.out});
  dense(by.first, k, images, layout, Activation::kTanh, hidden1);
  dense(by.second, k, hidden1, layout, Activation::kTanh, hidden2);
  dense(by.to_mu, k, hidden2, layout, Activation::kNone, mu);
  dense(by.to_log_sigma, k, hidden2, layout, Activation::kNone, log_sigma);
  for (int64_t i = 0; i < layout.rows * by.latent(); ++i) {
    const T value = log_sigma[i];
    log_sigma[i] = value < T(kLogSigmaMin) ? T(kLogSigmaMin) : value > T(kLogSigmaMax) ? T(kLogSigmaMax) : value;
  }
}

// weights [w1, b1, w2, b2, ...], each w [K, out, in] dense, b [K, out] dense -> layers
template <class T>
std::vector<Layer<T>> layers_of(const char* op, const std::vector<torch::stable::Tensor>& weights, int64_t experts,
                                torch::headeronly::ScalarType dtype) {
  using Sum = typename Layer<T>::Sum;
  constexpr bool kHalf = sizeof(T) < sizeof(Sum);  // then the biases come in float32
  const auto of_biases = kHalf ? torch::headeronly::ScalarType::Float : dtype;
  std::vector<Layer<T>> layers;
  for (size_t i = 0; i + 1 < weights.size(); i += 2) {
    const torch::stable::Tensor &w = weights[i], &b = weights[i + 1];
    if (w.scalar_type() != dtype || b.scalar_type() != of_biases || w.dim() != 3 || b.dim() != 2 || w.size(0) != experts ||
        b.size(0) != experts || w.size(1) != b.size(1) || !w.is_contiguous() || !b.is_contiguous()) {
      fail(op, ": weights must be dense [K, out, in] and [K, out] of one dtype, got ", shape(w), " and ", shape(b));
    }
    layers.push_back({static_cast<const T*>(w.data_ptr()), static_cast<const Sum*>(b.data_ptr()), w.size(2), w.size(1)});
  }
  return layers;
}

template <class T>
Encoder<T> encoder_of(const char* op, const std::vector<torch::stable::Tensor>& weights, int64_t experts,
                      torch::headeronly::ScalarType dtype) {
  if (weights.size() != 8) fail(op, ": takes 8 tensors of the encoder, got ", weights.size());
  const std::vector<Layer<T>> layers = layers_of<T>(op, weights, experts, dtype);
  return {layers[0], layers[1], layers[2], layers[3]};
}

}  // namespace levit
