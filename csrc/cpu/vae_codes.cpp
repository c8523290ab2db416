// Sampled codes of K MLP VAEs for the images that enter the memory: mu + sigma * noise.
#include "../ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "functions.h"
#include "mlp_vae.h"
#include "scratch.h"
#include "vector_width.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kBlockImages = 64;  // images of a task: they and a layer's weights stay in L2

// x [count] = e^x
template <class T>
LEVIT_INLINE void exponentials(T* x, int64_t count) {
  constexpr int kWidth = kLanesOf<T>;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(x + i, exp_of<T>(load<kWidth>(x + i)));
  for (; i < count; ++i) x[i] = std::exp(x[i]);
}

LEVIT_MULTIVERSION void exponentials_of(float* x, int64_t count) { exponentials(x, count); }
LEVIT_MULTIVERSION void exponentials_of(double* x, int64_t count) { exponentials(x, count); }

// Weights in bfloat16 want columns, however few the images.
template <class W, class T = typename Layer<W>::Sum>
Layout<T> layout_of(int64_t batch) {
  return Layout<T>(batch, sizeof(W) < sizeof(T));
}

// noise [batch, L] -> codes [batch, L] of expert k, for images that are laid out
template <class W, class T = typename Layer<W>::Sum>
void codes_of(const Encoder<W>& encoder, int64_t k, const T* images, int64_t batch, const T* noise, T* codes) {
  const Layout<T> layout = layout_of<W>(batch);
  const int64_t latent = encoder.latent();
  const auto [mu, sigma] = scratch<T, &codes_of<W>>({layout.rows * latent, layout.rows * latent});
  encode(encoder, k, images, layout, mu, sigma);  // of sigma the logarithm
  exponentials_of(sigma, layout.rows * latent);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t l = 0; l < latent; ++l, ++noise, ++codes) {
      const int64_t i = layout.at(b, l, latent);
      *codes = mu[i] + sigma[i] * *noise;
    }
  }
}

template <class W, class T = typename Layer<W>::Sum>
void compute(ScalarType dtype, const Tensor& images, const std::vector<Tensor>& weights, const Tensor& noise,
             Tensor& codes) {
  const int64_t experts = noise.size(0), batch = images.size(0), pixels = images.size(1);
  const Encoder<W> encoder = encoder_of<W>("vae_codes", weights, experts, dtype);
  const int64_t latent = encoder.latent();
  if (encoder.pixels() != pixels || !encoder.follows() || noise.size(1) != batch || noise.size(2) != latent) {
    fail("vae_codes: the sizes of the layers do not follow from each other for images ", shape(images), " and noise ",
         shape(noise));
  }
  const auto* from = static_cast<const T*>(images.data_ptr());
  const auto* draws = static_cast<const T*>(noise.data_ptr());
  auto* to = static_cast<T*>(codes.data_ptr());
  const int64_t blocks = (batch + kBlockImages - 1) / kBlockImages;
  const auto images_of = [&](int64_t block) { return std::min(kBlockImages, batch - block * kBlockImages); };
  const auto lay_out_block = [&](int64_t block, T* laid_out) {
    const Layout<T> layout = layout_of<W>(images_of(block));
    lay_out(from + block * kBlockImages * pixels, images_of(block), pixels, 1, layout, laid_out);
  };
  const int64_t of_block = layout_of<W>(std::min(kBlockImages, batch)).rows * pixels;
  std::vector<T> shared(experts > 1 ? blocks * of_block : 0);  // one expert lays out a block when it needs it
  torch::stable::parallel_for(0, experts > 1 ? blocks : 0, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) lay_out_block(block, shared.data() + block * of_block);
  });
  torch::stable::parallel_for(0, experts * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {  // all blocks of an expert while its weights are near
      const int64_t k = task / blocks, block = task % blocks, first = (k * batch + block * kBlockImages) * latent;
      const auto [own] = scratch<T, &compute<W>>({experts > 1 ? 0 : of_block});
      if (experts == 1) lay_out_block(block, own);
      const T* x = experts > 1 ? shared.data() + block * of_block : own;
      codes_of(encoder, k, x, images_of(block), draws + first, to + first);
    }
  });
}

}  // namespace

Tensor vae_codes(const Tensor& images, const std::vector<Tensor>& encoder, const Tensor& noise, bool bf16) {
  if (images.dim() != 2 || noise.dim() != 3 || noise.scalar_type() != images.scalar_type()) {
    fail("vae_codes: takes images [B, F] and noise [K, B, L] of one dtype, got ", shape(images), " and ", shape(noise));
  }
  const Tensor dense_images = torch::stable::contiguous(images), dense_noise = torch::stable::contiguous(noise);
  Tensor codes = torch::stable::new_empty(noise, {noise.size(0), noise.size(1), noise.size(2)});
  const ScalarType dtype = images.scalar_type();
  if (dtype == ScalarType::Float && rounds_factors<float>(bf16)) {
    std::vector<Tensor> rounded = encoder;
    for (Tensor& x : rounded) x = x.dim() == 3 && x.scalar_type() == dtype ? torch::stable::to(x, ScalarType::BFloat16) : x;
    compute<BFloat16>(ScalarType::BFloat16, dense_images, rounded, dense_noise, codes);
  } else if (dtype == ScalarType::Float) {
    compute<float>(dtype, dense_images, encoder, dense_noise, codes);
  } else if (dtype == ScalarType::Double) {
    compute<double>(dtype, dense_images, encoder, dense_noise, codes);
  } else {
    fail("vae_codes: images must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  return codes;
}

}  // namespace levit
