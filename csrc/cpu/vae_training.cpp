// The training loss of one MLP VAE, mean over images of sum over pixels (x^ - x)^2 + beta KL at one sampled code each, and
// all its gradients in the same call, while the activations are in the cache. First images, cut into parts for the
// threads, go forward and backward; then every thread sums the gradients of some layers' weights over all images.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dense_training.h"
#include "functions.h"
#include "mlp_vae.h"
#include "panels.h"
#include "scratch.h"
#include "vector_width.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

enum class Phase { kImages, kWeights };

template <class T>
struct VaeStep {
  // Encoder, decoder; in this order their weights and gradients come and go.
  TrainedLayer<T> to_first, to_second, to_mu, to_log_sigma, to_third, to_fourth, to_pixels;
  int64_t batch, stride;  // images, and these in whole vectors
  T beta;
  const T *images, *noise;  // [batch, pixels], [batch, latent]
  // Columns of activations; what is called by_ their gradients.
  T *x, *first, *second, *mu, *log_sigma, *draws, *codes, *third, *fourth, *by_output;
  T *by_first, *by_second, *by_mu, *by_log_sigma, *by_codes, *by_third, *by_fourth;
  T *first_rows, *second_rows, *code_rows, *third_rows, *fourth_rows;  // [batch, channels]
  T* losses;  // [stride]

  int64_t latent() const { return to_mu.out; }
};

template <class T>
struct VaeTraining {
  using Dense = DenseTraining<T>;
  using V = typename Dense::V;
  static constexpr int kWidth = Dense::kWidth;

  // The images [begin, end), begin and end in whole vectors
  static LEVIT_INLINE void images(const VaeStep<T>& s, int64_t begin, int64_t end) {
    const int64_t stride = s.stride, columns = end - begin, count = std::min(end, s.batch) - begin;
    const auto forward = [&](const TrainedLayer<T>& layer, const T* x, T* y) __attribute__((always_inline)) {
      Dense::forward(layer, 0, layer.out, x + begin, stride, columns, y + begin);
    };
    const auto backward = [&](const TrainedLayer<T>& layer, const T* by_y, bool add, T* by_x)
                              __attribute__((always_inline)) {
      Dense::to_inputs(layer, 0, layer.in, by_y + begin, stride, columns, add, by_x + begin);
    };
    const auto each = [&](int64_t channels, const auto& work) __attribute__((always_inline)) {
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t at = c * stride + begin; at < c * stride + end; at += kWidth) work(at);
      }
    };
    const auto tanh = [&](T* y, int64_t channels) __attribute__((always_inline)) {
      each(channels, [&](int64_t at) { store(y + at, tanh_of<T>(load<kWidth>(y + at))); });
    };
    const auto through_tanh = [&](const T* y, int64_t channels, T* by_y) __attribute__((always_inline)) {
      each(channels, [&](int64_t at) {
        const V value = load<kWidth>(y + at);
        store(by_y + at, load<kWidth>(by_y + at) * (1 - value * value));
      });
    };
    const auto to_rows = [&](const T* y, int64_t channels, T* rows) __attribute__((always_inline)) {
      Dense::to_rows(y + begin, stride, channels, count, rows + begin * channels);
    };
    const int64_t pixels = s.to_pixels.out, latent = s.latent();
    Dense::to_columns(s.images + begin * pixels, pixels, count, pixels, s.x + begin, stride, columns);
    Dense::to_columns(s.noise + begin * latent, latent, count, latent, s.draws + begin, stride, columns);
    forward(s.to_first, s.x, s.first);
    tanh(s.first, s.to_first.out);
    forward(s.to_second, s.first, s.second);
    tanh(s.second, s.to_second.out);
    forward(s.to_mu, s.second, s.mu);
    forward(s.to_log_sigma, s.second, s.log_sigma);
    for (int64_t r = begin; r < end; r += kWidth) store(s.losses + r, V{});
    each(latent, [&](int64_t at) {
      const V raw = load<kWidth>(s.log_sigma + at), mu = load<kWidth>(s.mu + at);
      const V low = raw < T(kLogSigmaMin) ? V{} + T(kLogSigmaMin) : raw;
      const V log_sigma = low > T(kLogSigmaMax) ? V{} + T(kLogSigmaMax) : low, sigma = exp_of<T>(log_sigma);
      const V draw = load<kWidth>(s.draws + at);
      store(s.codes + at, mu + sigma * draw);
      T* loss = s.losses + at % stride;
      store(loss, load<kWidth>(loss) + s.beta / 2 * (mu * mu + sigma * sigma - 1 - 2 * log_sigma));
      // What the code's gradient is multiplied with on its way to log sigma, and what its own part of the loss adds.
      const auto inside = raw >= T(kLogSigmaMin) && raw <= T(kLogSigmaMax);
      store(s.draws + at, inside ? sigma * draw : V{});
      store(s.by_log_sigma + at, inside ? s.beta * (sigma * sigma - 1) : V{});
    });
    forward(s.to_third, s.codes, s.third);
    tanh(s.third, s.to_third.out);
    forward(s.to_fourth, s.third, s.fourth);
    each(s.to_fourth.out, [&](int64_t at) {
      const V value = load<kWidth>(s.fourth + at);
      store(s.fourth + at, value < 0 ? V{} : value);
    });
    forward(s.to_pixels, s.fourth, s.by_output);
    const T share = T(1) / static_cast<T>(s.batch);
    each(pixels, [&](int64_t at) {
      const V difference = load<kWidth>(s.by_output + at) - load<kWidth>(s.x + at);
      T* loss = s.losses + at % stride;
      store(loss, load<kWidth>(loss) + difference * difference);
      store(s.by_output + at, 2 * share * difference);
    });

    backward(s.to_pixels, s.by_output, false, s.by_fourth);
    each(s.to_fourth.out, [&](int64_t at) {
      store(s.by_fourth + at, load<kWidth>(s.fourth + at) > 0 ? load<kWidth>(s.by_fourth + at) : V{});
    });
    backward(s.to_fourth, s.by_fourth, false, s.by_third);
    through_tanh(s.third, s.to_third.out, s.by_third);
    backward(s.to_third, s.by_third, false, s.by_codes);
    each(latent, [&](int64_t at) {
      const V by_code = load<kWidth>(s.by_codes + at);
      store(s.by_mu + at, by_code + share * s.beta * load<kWidth>(s.mu + at));
      store(s.by_log_sigma + at, by_code * load<kWidth>(s.draws + at) + share * load<kWidth>(s.by_log_sigma + at));
    });
    backward(s.to_mu, s.by_mu, false, s.by_second);
    backward(s.to_log_sigma, s.by_log_sigma, true, s.by_second);
    through_tanh(s.second, s.to_second.out, s.by_second);
    backward(s.to_second, s.by_second, false, s.by_first);
    through_tanh(s.first, s.to_first.out, s.by_first);

    to_rows(s.first, s.to_first.out, s.first_rows);
    to_rows(s.second, s.to_second.out, s.second_rows);
    to_rows(s.codes, latent, s.code_rows);
    to_rows(s.third, s.to_third.out, s.third_rows);
    to_rows(s.fourth, s.to_fourth.out, s.fourth_rows);
  }

  // The outputs [begin, end) of all layers, counted layer after layer
  static LEVIT_INLINE void weights(const VaeStep<T>& s, int64_t begin, int64_t end) {
    struct Part {
      const TrainedLayer<T>& layer;
      const T *by_y, *x;
    };
    const Part parts[] = {
        {s.to_first, s.by_first, s.images},        {s.to_second, s.by_second, s.first_rows},
        {s.to_mu, s.by_mu, s.second_rows},         {s.to_log_sigma, s.by_log_sigma, s.second_rows},
        {s.to_third, s.by_third, s.code_rows},    {s.to_fourth, s.by_fourth, s.third_rows},
        {s.to_pixels, s.by_output, s.fourth_rows},
    };
    for (const Part& part : parts) {
      const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, part.layer.out);
      if (first < last) Dense::to_weights(part.layer, first, last, part.by_y, s.stride, s.batch, part.x);
      begin -= part.layer.out, end -= part.layer.out;
    }
  }

  static LEVIT_INLINE void run(const VaeStep<T>& s, Phase phase, int64_t begin, int64_t end) {
    if (phase == Phase::kImages) images(s, begin, end);
    if (phase == Phase::kWeights) weights(s, begin, end);
  }
};

LEVIT_MULTIVERSION void run(const VaeStep<float>& step, Phase phase, int64_t begin, int64_t end) {
  VaeTraining<float>::run(step, phase, begin, end);
}

LEVIT_MULTIVERSION void run(const VaeStep<double>& step, Phase phase, int64_t begin, int64_t end) {
  VaeTraining<double>::run(step, phase, begin, end);
}

// One phase over [0, count), cut between multiples of `together`.
template <class T>
void in_parts(const VaeStep<T>& step, Phase phase, int64_t count, int64_t together) {
  torch::stable::parallel_for(0, (count + together - 1) / together, 1, [&](int64_t begin, int64_t end) {
    run(step, phase, begin * together, std::min(count, end * together));
  });
}

template <class T>
std::vector<Tensor> compute(const Tensor& images, const std::vector<Tensor>& weights, double beta,
                            const Tensor& noise, bool bf16) {
  const int64_t batch = images.size(0), pixels = images.size(1);
  std::vector<Tensor> results{torch::stable::new_empty(images, {})};
  std::vector<TrainedLayer<T>> layers;
  for (size_t i = 0; i < weights.size(); i += 2) {
    const Tensor &w = weights[i], &b = weights[i + 1];
    if (w.scalar_type() != images.scalar_type() || b.scalar_type() != images.scalar_type() || w.dim() != 2 ||
        b.dim() != 1 || w.size(0) != b.size(0) || !w.is_contiguous() || !b.is_contiguous()) {
      fail("vae_training: weights must be dense [out, in] and [out] of the images' dtype, got ", shape(w), " and ",
           shape(b));
    }
    results.push_back(torch::stable::empty_like(w));
    results.push_back(torch::stable::empty_like(b));
    layers.push_back({static_cast<const T*>(w.data_ptr()), static_cast<const T*>(b.data_ptr()), w.size(1), w.size(0),
                      static_cast<T*>(results[i + 1].data_ptr()), static_cast<T*>(results[i + 2].data_ptr()),
                      rounds_factors<T>(bf16)});
  }
  VaeStep<T> s{};
  s.to_first = layers[0], s.to_second = layers[1], s.to_mu = layers[2], s.to_log_sigma = layers[3];
  s.to_third = layers[4], s.to_fourth = layers[5], s.to_pixels = layers[6];
  const int64_t latent = s.latent();
  if (s.to_first.in != pixels || s.to_second.in != s.to_first.out || s.to_mu.in != s.to_second.out ||
      s.to_log_sigma.in != s.to_second.out || s.to_log_sigma.out != latent || s.to_third.in != latent ||
      s.to_fourth.in != s.to_third.out || s.to_pixels.in != s.to_fourth.out || s.to_pixels.out != pixels ||
      noise.size(0) != batch || noise.size(1) != latent) {
    fail("vae_training: the sizes of the layers do not follow from each other for images ", shape(images),
         " and noise ", shape(noise));
  }
  s.batch = batch, s.stride = round_up(batch, kLanesOf<T>), s.beta = static_cast<T>(beta);
  s.images = static_cast<const T*>(images.data_ptr()), s.noise = static_cast<const T*>(noise.data_ptr());
  struct Buffer {
    T** place;
    int64_t channels;
  };
  const int64_t first = s.to_first.out, second = s.to_second.out, third = s.to_third.out, fourth = s.to_fourth.out;
  const Buffer buffers[] = {
      {&s.x, pixels},           {&s.first, first},           {&s.second, second},
      {&s.mu, latent},          {&s.log_sigma, latent},      {&s.draws, latent},
      {&s.codes, latent},       {&s.third, third},           {&s.fourth, fourth},
      {&s.by_output, pixels},   {&s.by_first, first},        {&s.by_second, second},
      {&s.by_mu, latent},       {&s.by_log_sigma, latent},   {&s.by_codes, latent},
      {&s.by_third, third},     {&s.by_fourth, fourth},      {&s.first_rows, first},
      {&s.second_rows, second}, {&s.code_rows, latent},      {&s.third_rows, third},
      {&s.fourth_rows, fourth}, {&s.losses, 1},
  };
  int64_t channels = 0;
  for (const Buffer& buffer : buffers) channels += buffer.channels;
  const auto [memory] = scratch<T, &compute<T>>({channels * s.stride});
  T* next = memory;
  for (const Buffer& buffer : buffers) {
    *buffer.place = next;
    next += buffer.channels * s.stride;
  }
  in_parts(s, Phase::kImages, s.stride, 2 * kLanesOf<T>);
  int64_t outputs = 0;
  for (const TrainedLayer<T>& layer : layers) outputs += layer.out;
  in_parts(s, Phase::kWeights, outputs, 2 * DenseTraining<T>::kChannels);
  T total = 0;
  for (int64_t b = 0; b < batch; ++b) total += s.losses[b];
  *static_cast<T*>(results[0].data_ptr()) = total / static_cast<T>(batch);
  return results;
}

}  // namespace

std::vector<Tensor> vae_training(const Tensor& images, const std::vector<Tensor>& weights, double beta,
                                 const Tensor& noise, bool bf16) {
  if (images.dim() != 2 || images.size(0) < 1 || weights.size() != 14 || noise.dim() != 2 ||
      noise.scalar_type() != images.scalar_type()) {
    fail("vae_training: takes images [B, F] with B >= 1, 14 tensors of weights and noise [B, L] of the same dtype, got ",
         shape(images), ", ", weights.size(), " and ", shape(noise));
  }
  const Tensor dense_images = torch::stable::contiguous(images), dense_noise = torch::stable::contiguous(noise);
  if (images.scalar_type() == ScalarType::Float) return compute<float>(dense_images, weights, beta, dense_noise, bf16);
  if (images.scalar_type() == ScalarType::Double) return compute<double>(dense_images, weights, beta, dense_noise, bf16);
  fail("vae_training: images must be float32 or float64, got ", torch::headeronly::toString(images.scalar_type()));
}

}  // namespace levit
