// Routing scores of K MLP VAEs for few images: sum over pixels of (x^ - x)^2 + beta KL, at the mean code or averaged
// over given draws. With few images nothing but the reading of the weights counts: every row of a weight matrix is read
// once, in memory order, and serves all images.
#include "../ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dot.h"
#include "multiversion.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

constexpr double kLogSigmaMin = -8, kLogSigmaMax = 4;

// One layer of all experts: weights [K, out, in], bias [K, out].
template <class T>
struct Layer {
  const T *weight, *bias;
  int64_t in, out;
};

enum class Activation { kNone, kTanh, kRelu };

template <class T>
LEVIT_INLINE T activate(T x, Activation activation) {
  if (activation == Activation::kTanh) return std::tanh(x);
  if (activation == Activation::kRelu) return x < 0 ? T(0) : x;  // a NaN stays one
  return x;
}

// y [rows, out] = activation(x [rows, in] w^T + b) of expert k
template <class T>
LEVIT_INLINE void dense(const Layer<T>& layer, int64_t k, const T* x, int64_t rows, Activation activation, T* y) {
  const T *w = layer.weight + k * layer.out * layer.in, *bias = layer.bias + k * layer.out;
  for (int64_t o = 0; o < layer.out; ++o, w += layer.in) {
    for (int64_t r = 0; r < rows; ++r) {
      y[r * layer.out + o] = activate(bias[o] + dot(x + r * layer.in, w, layer.in), activation);
    }
  }
}

template <class T>
struct Call {
  int64_t experts, batch, draws;  // draws is 1 at the mean code
  const T *images, *noise;        // [B, F], [S, L] or null
  Layer<T> encoder[4], decoder[3];
  double beta;
};

// losses[b] of expert k, b = 0 .. B-1
template <class T>
LEVIT_INLINE void expert_losses(const Call<T>& call, int64_t k, T* losses, int64_t stride) {
  const auto& [first, second, to_mu, to_log_sigma] = call.encoder;
  const int64_t latent = to_mu.out, pixels = call.decoder[2].out, rows = call.batch * call.draws;
  std::vector<T> hidden1(call.batch * first.out), hidden2(call.batch * second.out);
  std::vector<T> mu(call.batch * latent), log_sigma(call.batch * latent), codes(rows * latent);
  dense(first, k, call.images, call.batch, Activation::kTanh, hidden1.data());
  dense(second, k, hidden1.data(), call.batch, Activation::kTanh, hidden2.data());
  dense(to_mu, k, hidden2.data(), call.batch, Activation::kNone, mu.data());
  dense(to_log_sigma, k, hidden2.data(), call.batch, Activation::kNone, log_sigma.data());
  for (T& number : log_sigma) {
    number = number < T(kLogSigmaMin) ? T(kLogSigmaMin) : number > T(kLogSigmaMax) ? T(kLogSigmaMax) : number;
  }
  for (int64_t s = 0; s < call.draws; ++s) {
    for (int64_t i = 0; i < call.batch * latent; ++i) {
      const T shift = call.noise ? std::exp(log_sigma[i]) * call.noise[s * latent + i % latent] : T(0);
      codes[s * call.batch * latent + i] = mu[i] + shift;
    }
  }
  std::vector<T> up1(rows * call.decoder[0].out), up2(rows * call.decoder[1].out), pixel(rows * pixels);
  dense(call.decoder[0], k, codes.data(), rows, Activation::kTanh, up1.data());
  dense(call.decoder[1], k, up1.data(), rows, Activation::kRelu, up2.data());
  dense(call.decoder[2], k, up2.data(), rows, Activation::kNone, pixel.data());
  for (int64_t b = 0; b < call.batch; ++b) {
    T error = 0, divergence = 0;
    for (int64_t s = 0; s < call.draws; ++s) {
      const T *out = pixel.data() + (s * call.batch + b) * pixels, *image = call.images + b * pixels;
      T squares = 0;
      for (int64_t i = 0; i < pixels; ++i) squares += (out[i] - image[i]) * (out[i] - image[i]);
      error += squares;
    }
    for (int64_t i = b * latent; i < (b + 1) * latent; ++i) {
      divergence += mu[i] * mu[i] + std::exp(2 * log_sigma[i]) - 1 - 2 * log_sigma[i];
    }
    losses[b * stride] = error / static_cast<T>(call.draws) + static_cast<T>(call.beta / 2) * divergence;
  }
}

LEVIT_MULTIVERSION void losses_of(const Call<float>& call, int64_t k, float* losses, int64_t stride) {
  expert_losses(call, k, losses, stride);
}

LEVIT_MULTIVERSION void losses_of(const Call<double>& call, int64_t k, double* losses, int64_t stride) {
  expert_losses(call, k, losses, stride);
}

// weights [w1, b1, w2, b2, ...], each w [K, out, in] dense, b [K, out] dense -> layers
template <class T>
void layers_of(const std::vector<Tensor>& weights, int64_t experts, ScalarType dtype, Layer<T>* layers) {
  for (size_t i = 0; i + 1 < weights.size(); i += 2) {
    const Tensor &w = weights[i], &b = weights[i + 1];
    if (w.scalar_type() != dtype || b.scalar_type() != dtype || w.dim() != 3 || b.dim() != 2 || w.size(0) != experts ||
        b.size(0) != experts || w.size(1) != b.size(1) || !w.is_contiguous() || !b.is_contiguous()) {
      fail("elbo_loss: weights must be dense [K, out, in] and [K, out] of one dtype, got ", shape(w), " and ", shape(b));
    }
    layers[i / 2] = {static_cast<const T*>(w.data_ptr()), static_cast<const T*>(b.data_ptr()), w.size(2), w.size(1)};
  }
}

template <class T>
void compute(const Tensor& images, const std::vector<Tensor>& encoder, const std::vector<Tensor>& decoder, double beta,
             const Tensor* noise, Tensor& losses) {
  const int64_t experts = losses.size(1);
  Call<T> call{experts, images.size(0), noise ? noise->size(0) : 1, static_cast<const T*>(images.data_ptr()),
               noise ? static_cast<const T*>(noise->data_ptr()) : nullptr, {}, {}, beta};
  layers_of(encoder, experts, images.scalar_type(), call.encoder);
  layers_of(decoder, experts, images.scalar_type(), call.decoder);
  const Layer<T>(&e)[4] = call.encoder, (&d)[3] = call.decoder;
  if (e[0].in != images.size(1) || d[2].out != e[0].in || e[1].in != e[0].out || e[2].in != e[1].out ||
      e[3].in != e[1].out || e[3].out != e[2].out || d[0].in != e[2].out || d[1].in != d[0].out || d[2].in != d[1].out ||
      (noise && noise->size(1) != e[2].out)) {
    fail("elbo_loss: the sizes of the layers do not follow from each other for images ", shape(images));
  }
  auto* to = static_cast<T*>(losses.data_ptr());
  torch::stable::parallel_for(0, experts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) losses_of(call, k, to + k, experts);
  });
}

}  // namespace

Tensor elbo_loss(const Tensor& images, const std::vector<Tensor>& encoder, const std::vector<Tensor>& decoder,
                 double beta, const std::optional<Tensor>& noise) {
  if (images.dim() != 2 || encoder.size() != 8 || decoder.size() != 6) {
    fail("elbo_loss: takes images [B, F], 8 tensors of the encoder and 6 of the decoder, got ", shape(images), ", ",
         encoder.size(), " and ", decoder.size());
  }
  const Tensor dense_images = torch::stable::contiguous(images);
  Tensor dense_noise;
  if (noise) dense_noise = torch::stable::contiguous(*noise);
  const Tensor* draws = noise ? &dense_noise : nullptr;
  Tensor losses = torch::stable::new_empty(images, {images.size(0), encoder[0].size(0)});
  if (images.scalar_type() == ScalarType::Float) {
    compute<float>(dense_images, encoder, decoder, beta, draws, losses);
  } else if (images.scalar_type() == ScalarType::Double) {
    compute<double>(dense_images, encoder, decoder, beta, draws, losses);
  } else {
    fail("elbo_loss: images must be float32 or float64, got ", torch::headeronly::toString(images.scalar_type()));
  }
  return losses;
}

}  // namespace levit
