// Routing scores of K MLP VAEs: sum over pixels of (x^ - x)^2 + beta KL, at the mean code or averaged
// over given draws.
#include "../ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "mlp_vae.h"
#include "multiversion.h"
#include "vector_width.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kBlockCodes = 256;  // codes of a task: what is kept of them stays in the cache

// W is the type of the weights; everything else is T.
template <class W, class T = typename Layer<W>::Sum>
struct Call {
  Encoder<W> encoder;
  Layer<W> decoder[3];
  double beta;
  const T* noise;  // [draws, L]; null at the mean code, which counts as one draw
  int64_t draws;
};

// Some images, laid out for the encoder, and once per draw for the decoder.
template <class T>
struct Block {
  int64_t first, batch, draws;
  Layout<T> encoding, decoding;
  std::vector<T> images, targets;

  Block(int64_t first, int64_t batch, int64_t draws, bool columns)
      : first(first), batch(batch), draws(draws), encoding(batch, columns), decoding(batch * draws, columns) {}

  void take(const T* from, int64_t pixels) {
    images.resize(encoding.rows * pixels);
    targets.resize(decoding.rows * pixels);
    lay_out(from + first * pixels, batch, pixels, 1, encoding, images.data());
    lay_out(from + first * pixels, batch, pixels, draws, decoding, targets.data());
  }
};

// Sum over pixels of (x^ - x)^2 for every code
template <class T>
LEVIT_INLINE void squared_errors(const T* decoded, const T* targets, int64_t pixels, const Layout<T>& layout, T* errors) {
  constexpr int kWidth = kLanesOf<T>;
  if (!layout.columns) {
    for (int64_t r = 0; r < layout.rows; ++r, decoded += pixels, targets += pixels) {
      errors[r] = 0;
      for (int64_t i = 0; i < pixels; ++i) errors[r] += (decoded[i] - targets[i]) * (decoded[i] - targets[i]);
    }
    return;
  }
  for (int64_t column = 0; column < layout.rows; column += kWidth) {
    Lanes<T, kWidth> squares = {};
    for (int64_t i = column; i < pixels * layout.rows; i += layout.rows) {
      const auto difference = load<kWidth>(decoded + i) - load<kWidth>(targets + i);
      squares += difference * difference;
    }
    store(errors + column, squares);
  }
}

LEVIT_MULTIVERSION void errors_of(const float* decoded, const float* targets, int64_t pixels,
                                  const Layout<float>& layout, float* errors) {
  squared_errors(decoded, targets, pixels, layout, errors);
}

LEVIT_MULTIVERSION void errors_of(const double* decoded, const double* targets, int64_t pixels,
                                  const Layout<double>& layout, double* errors) {
  squared_errors(decoded, targets, pixels, layout, errors);
}

// losses[b * stride] of expert k, b = 0 .. batch - 1
template <class W, class T = typename Layer<W>::Sum>
void losses_of(const Call<W>& call, const Block<T>& block, int64_t k, T* losses, int64_t stride) {
  const auto& [to_first, to_second, to_pixels] = call.decoder;
  const int64_t latent = call.encoder.latent(), batch = block.batch;
  const Layout<T>&encoding = block.encoding, &decoding = block.decoding;
  std::vector<T> mu(encoding.rows * latent), log_sigma(encoding.rows * latent), codes(decoding.rows * latent);
  encode(call.encoder, k, block.images.data(), encoding, mu.data(), log_sigma.data());
  for (int64_t s = 0; s < call.draws; ++s) {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t l = 0; l < latent; ++l) {
        const int64_t i = encoding.at(b, l, latent);
        const T shift = call.noise ? std::exp(log_sigma[i]) * call.noise[s * latent + l] : T(0);
        codes[decoding.at(s * batch + b, l, latent)] = mu[i] + shift;
      }
    }
  }
  std::vector<T> first(decoding.rows * to_first.out), second(decoding.rows * to_second.out);
  std::vector<T> decoded(decoding.rows * to_pixels.out), errors(decoding.rows);
  dense(to_first, k, codes.data(), decoding, Activation::kTanh, first.data());
  dense(to_second, k, first.data(), decoding, Activation::kRelu, second.data());
  dense(to_pixels, k, second.data(), decoding, Activation::kNone, decoded.data());
  errors_of(decoded.data(), block.targets.data(), to_pixels.out, decoding, errors.data());
  for (int64_t b = 0; b < batch; ++b) {
    T error = 0, divergence = 0;
    for (int64_t s = 0; s < call.draws; ++s) error += errors[s * batch + b];
    for (int64_t l = 0; l < latent; ++l) {
      const int64_t i = encoding.at(b, l, latent);
      divergence += mu[i] * mu[i] + std::exp(2 * log_sigma[i]) - 1 - 2 * log_sigma[i];
    }
    losses[b * stride] = error / static_cast<T>(call.draws) + static_cast<T>(call.beta / 2) * divergence;
  }
}

template <class W, class T = typename Layer<W>::Sum>
void compute(ScalarType dtype, const Tensor& images, const std::vector<Tensor>& encoder,
             const std::vector<Tensor>& decoder, double beta, const Tensor* noise, Tensor& losses) {
  const int64_t experts = losses.size(1), batch = images.size(0), pixels = images.size(1);
  const Encoder<W> e = encoder_of<W>("elbo_loss", encoder, experts, dtype);
  const std::vector<Layer<W>> d = layers_of<W>("elbo_loss", decoder, experts, dtype);
  if (e.pixels() != pixels || !e.follows() || d[2].out != pixels || d[0].in != e.latent() || d[1].in != d[0].out ||
      d[2].in != d[1].out || (noise && noise->size(1) != e.latent())) {
    fail("elbo_loss: the sizes of the layers do not follow from each other for images ", shape(images));
  }
  const Call<W> call{e, {d[0], d[1], d[2]}, beta, noise ? static_cast<const T*>(noise->data_ptr()) : nullptr,
                     noise ? noise->size(0) : 1};
  const int64_t most = std::max<int64_t>(1, kBlockCodes / std::max<int64_t>(1, call.draws));
  std::vector<Block<T>> blocks;
  for (int64_t b = 0; b < batch; b += most) blocks.emplace_back(b, std::min(most, batch - b), call.draws, sizeof(W) < sizeof(T));
  const auto* from = static_cast<const T*>(images.data_ptr());
  torch::stable::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) blocks[i].take(from, pixels);
  });
  auto* to = static_cast<T*>(losses.data_ptr());
  const int64_t count = blocks.size();
  torch::stable::parallel_for(0, experts * count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {  // all blocks of an expert while its weights are near
      const Block<T>& block = blocks[task % count];
      losses_of(call, block, task / count, to + block.first * experts + task / count, experts);
    }
  });
}

}  // namespace

Tensor elbo_loss(const Tensor& images, const std::vector<Tensor>& encoder, const std::vector<Tensor>& decoder,
                 double beta, const std::optional<Tensor>& noise) {
  if (images.dim() != 2 || encoder.size() != 8 || decoder.size() != 6) {
    fail("elbo_loss: takes images [B, F], 8 tensors of the encoder and 6 of the decoder, got ", shape(images), ", ",
         encoder.size(), " and ", decoder.size());
  }
  const ScalarType dtype = images.scalar_type();
  const bool half = dtype == ScalarType::BFloat16;
  const auto wide = [&](const Tensor& tensor) {
    return torch::stable::contiguous(half ? torch::stable::to(tensor, ScalarType::Float) : tensor);
  };
  const Tensor dense_images = wide(images);
  Tensor dense_noise;
  if (noise) dense_noise = wide(*noise);
  const Tensor* draws = noise ? &dense_noise : nullptr;
  Tensor losses = torch::stable::new_empty(dense_images, {images.size(0), encoder[0].size(0)});
  if (half) {
    const bool dots = has_bf16_dots();
    const auto of = [&](std::vector<Tensor> weights) {
      for (Tensor& x : weights) x = !dots || x.dim() == 2 ? wide(x) : x;
      return weights;
    };
    (dots ? compute<BFloat16> : compute<float>)(dots ? dtype : ScalarType::Float, dense_images, of(encoder),
                                                of(decoder), beta, draws, losses);
  } else if (dtype == ScalarType::Float) {
    compute<float>(dtype, dense_images, encoder, decoder, beta, draws, losses);
  } else if (dtype == ScalarType::Double) {
    compute<double>(dtype, dense_images, encoder, decoder, beta, draws, losses);
  } else {
    fail("elbo_loss: images must be bfloat16, float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  return losses;
}

}  // namespace levit
