// The classifier's training loss, cross-entropy behind (linear, batch norm, LeakyReLU) per hidden layer and a linear one,
// and all its gradients in the same call. Batch norm wants all images of a channel, so threads share out channels; no
// phase adds up what threads computed apart.
#include "../ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dense_training.h"
#include "panels.h"
#include "scratch.h"
#include "vector_width.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

enum class Phase { kColumns, kForward, kRows, kBackward, kWeights, kInputs };

// A linear layer and, unless it is the last, what follows. Activations are columns, [channels, stride].
template <class T>
struct HeadLayer {
  TrainedLayer<T> linear;
  const T *gain, *shift;
  T *by_gain, *by_shift, *mean, *variance;
  T *normal, *out, *by_linear;  // the linear map's result normalised, the layer's output, the linear map's gradient
  T* out_rows;                  // [batch, channels]
};

template <class T>
struct HeadStep {
  std::vector<HeadLayer<T>> layers;
  int64_t batch, stride;
  T slope, epsilon;
  const T* features;  // [batch, inputs]
  T *x, *by_features;

  const T* input(size_t i) const { return i ? layers[i - 1].out : x; }
  const T* input_rows(size_t i) const { return i ? layers[i - 1].out_rows : features; }
  bool is_last(size_t i) const { return i + 1 == layers.size(); }
};

template <class T>
struct HeadTraining {
  using Dense = DenseTraining<T>;
  using V = typename Dense::V;
  static constexpr int kWidth = Dense::kWidth;

  static LEVIT_INLINE void forward(const HeadStep<T>& s, size_t i, int64_t begin, int64_t end) {
    const HeadLayer<T>& layer = s.layers[i];
    T* linear = s.is_last(i) ? layer.out : layer.normal;
    if (i == 0 && layer.linear.bf16) {
      Dense::forward_rows(layer.linear, begin, end, s.features, s.batch, s.stride, linear);
    } else {
      Dense::forward(layer.linear, begin, end, s.input(i), s.stride, s.stride, linear);
    }
    for (int64_t c = begin; !s.is_last(i) && c < end; ++c) {
      T *normal = layer.normal + c * s.stride, *out = layer.out + c * s.stride;
      const T mean = Dense::sum(normal, s.batch) / static_cast<T>(s.batch);
      for (int64_t r = 0; r < s.stride; r += kWidth) {
        const V centred = load<kWidth>(normal + r) - mean;
        store(normal + r, centred);
        store(out + r, centred * centred);
      }
      const T variance = Dense::sum(out, s.batch) / static_cast<T>(s.batch);
      const T scale = 1 / std::sqrt(variance + s.epsilon);
      layer.mean[c] = mean, layer.variance[c] = variance;
      for (int64_t r = 0; r < s.stride; r += kWidth) {
        const V value = load<kWidth>(normal + r) * scale, shifted = value * layer.gain[c] + layer.shift[c];
        store(normal + r, value);
        store(out + r, shifted > 0 ? shifted : shifted * s.slope);
      }
    }
  }

  // Of the channels [begin, end) of hidden layer i, from the gradient of the next layer's linear map
  static LEVIT_INLINE void backward(const HeadStep<T>& s, size_t i, int64_t begin, int64_t end) {
    const HeadLayer<T>&layer = s.layers[i], &next = s.layers[i + 1];
    Dense::to_inputs(next.linear, begin, end, next.by_linear, s.stride, s.stride, false, layer.by_linear);
    for (int64_t c = begin; c < end; ++c) {
      T *by = layer.by_linear + c * s.stride, *product = layer.out + c * s.stride;  // the outputs are kept in rows
      const T* normal = layer.normal + c * s.stride;
      for (int64_t r = 0; r < s.stride; r += kWidth) {
        const V by_out = load<kWidth>(by + r), by_shifted = load<kWidth>(product + r) > 0 ? by_out : by_out * s.slope;
        store(by + r, by_shifted);
        store(product + r, by_shifted * load<kWidth>(normal + r));
      }
      const T by_shift = Dense::sum(by, s.batch), by_gain = Dense::sum(product, s.batch);
      layer.by_shift[c] = by_shift, layer.by_gain[c] = by_gain;
      const T scale = layer.gain[c] / std::sqrt(layer.variance[c] + s.epsilon), share = 1 / static_cast<T>(s.batch);
      for (int64_t r = 0; r < s.stride; r += kWidth) {
        const V rest = load<kWidth>(by + r) - share * by_shift - load<kWidth>(normal + r) * (share * by_gain);
        store(by + r, rest * scale);
      }
    }
  }

  // The outputs [begin, end) of all layers, counted layer after layer
  static LEVIT_INLINE void weights(const HeadStep<T>& s, int64_t begin, int64_t end) {
    for (size_t i = 0; i < s.layers.size(); ++i) {
      const TrainedLayer<T>& linear = s.layers[i].linear;
      const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, linear.out);
      if (first < last) Dense::to_weights(linear, first, last, s.layers[i].by_linear, s.stride, s.batch, s.input_rows(i));
      begin -= linear.out, end -= linear.out;
    }
  }

  static LEVIT_INLINE void run(const HeadStep<T>& s, Phase phase, size_t i, int64_t begin, int64_t end) {
    const int64_t count = std::min(end, s.batch) - begin, inputs = s.layers[0].linear.in;  // where images are shared out
    if (phase == Phase::kColumns) {
      Dense::to_columns(s.features + begin * inputs, inputs, count, inputs, s.x + begin, s.stride, end - begin);
    }
    if (phase == Phase::kForward) forward(s, i, begin, end);
    if (phase == Phase::kRows) {
      const HeadLayer<T>& layer = s.layers[i];
      const int64_t channels = layer.linear.out;
      Dense::to_rows(layer.out + begin, s.stride, channels, count, layer.out_rows + begin * channels);
    }
    if (phase == Phase::kBackward) backward(s, i, begin, end);
    if (phase == Phase::kWeights) weights(s, begin, end);
    if (phase == Phase::kInputs) {
      Dense::to_input_rows(s.layers[0].linear, s.layers[0].by_linear + begin, s.stride, count,
                           s.by_features + begin * inputs);
    }
  }
};

LEVIT_MULTIVERSION void run(const HeadStep<float>& step, Phase phase, size_t i, int64_t begin, int64_t end) {
  HeadTraining<float>::run(step, phase, i, begin, end);
}

LEVIT_MULTIVERSION void run(const HeadStep<double>& step, Phase phase, size_t i, int64_t begin, int64_t end) {
  HeadTraining<double>::run(step, phase, i, begin, end);
}

// The mean over the images with a label, and the logits' gradient: share out - [label] or, without a label, zero.
template <class T>
T cross_entropy(const HeadStep<T>& s, const int64_t* labels) {
  const HeadLayer<T>& last = s.layers.back();
  const int64_t classes = last.linear.out, labelled = s.batch - std::count(labels, labels + s.batch, -1);
  const T share = 1 / static_cast<T>(std::max<int64_t>(1, labelled));
  T loss = 0;
  std::fill(last.by_linear, last.by_linear + classes * s.stride, T(0));
  for (int64_t b = 0; b < s.batch; ++b) {
    if (labels[b] == -1) continue;
    const T* logits = last.out + b;
    T most = logits[0], total = 0;
    for (int64_t c = 1; c < classes; ++c) most = std::max(most, logits[c * s.stride]);
    for (int64_t c = 0; c < classes; ++c) {
      const T power = std::exp(logits[c * s.stride] - most);
      last.by_linear[c * s.stride + b] = power;
      total += power;
    }
    for (int64_t c = 0; c < classes; ++c) last.by_linear[c * s.stride + b] *= share / total;
    last.by_linear[labels[b] * s.stride + b] -= share;
    loss += std::log(total) - (logits[labels[b] * s.stride] - most);
  }
  return loss * share;
}

template <class T>
std::vector<Tensor> compute(const Tensor& features, const Tensor& labels, const std::vector<Tensor>& weights,
                            double slope, double epsilon, bool bf16) {
  const auto take = [&](size_t i, const std::vector<int64_t>& sizes) {
    const Tensor& of = weights[i];
    bool right = of.scalar_type() == features.scalar_type() && of.is_contiguous() &&
                 of.dim() == static_cast<int64_t>(sizes.size());
    for (size_t d = 0; right && d < sizes.size(); ++d) right = of.size(d) == sizes[d];
    if (!right) fail("head_training: weight ", i, " does not follow from those before, got ", shape(of));
    return static_cast<const T*>(of.data_ptr());
  };
  std::vector<Tensor> results{torch::stable::new_empty(features, {}), torch::stable::empty_like(features)};
  const auto give = [&](const std::vector<int64_t>& sizes) {
    results.push_back(torch::stable::new_empty(features, sizes));
    return static_cast<T*>(results.back().data_ptr());
  };
  HeadStep<T> s{};
  s.batch = features.size(0), s.stride = round_up(s.batch, kLanesOf<T>);
  s.slope = static_cast<T>(slope), s.epsilon = static_cast<T>(epsilon);
  s.features = static_cast<const T*>(features.data_ptr()), s.by_features = static_cast<T*>(results[1].data_ptr());
  int64_t in = features.size(1), channels = in, outputs = 0;
  for (size_t i = 0; i < weights.size();) {
    if (weights[i].dim() != 2) fail("head_training: weight ", i, " must be [out, in], got ", shape(weights[i]));
    const int64_t out = weights[i].size(0);
    HeadLayer<T> layer{};
    layer.linear = {take(i, {out, in}), nullptr, in, out, give({out, in}), nullptr, rounds_factors<T>(bf16)};
    if (i + 2 == weights.size()) {
      layer.linear.bias = take(i + 1, {out}), layer.linear.by_bias = give({out});
      i += 2;
    } else {
      layer.gain = take(i + 1, {out}), layer.shift = take(i + 2, {out});
      layer.by_gain = give({out}), layer.by_shift = give({out});
      i += 3;
    }
    in = out, channels += 4 * out, outputs += out;
    s.layers.push_back(layer);
  }
  for (size_t i = 0; i + 1 < s.layers.size(); ++i) {
    s.layers[i].mean = give({s.layers[i].linear.out}), s.layers[i].variance = give({s.layers[i].linear.out});
  }
  const auto [memory] = scratch<T, &compute<T>>({channels * s.stride});
  T* next = memory;
  const auto columns = [&](int64_t count) {
    T* place = next;
    next += count * s.stride;
    return place;
  };
  s.x = columns(features.size(1));
  for (HeadLayer<T>& layer : s.layers) {
    const int64_t out = layer.linear.out;
    layer.normal = columns(out), layer.out = columns(out), layer.by_linear = columns(out), layer.out_rows = columns(out);
  }
  const auto in_parts = [&](Phase phase, size_t i, int64_t count, int64_t together) {
    torch::stable::parallel_for(0, (count + together - 1) / together, 1, [&](int64_t begin, int64_t end) {
      run(s, phase, i, begin * together, std::min(count, end * together));
    });
  };
  constexpr int64_t kImages = 2 * kLanesOf<T>, kChannels = DenseTraining<T>::kChannels;
  if (!s.layers[0].linear.bf16) in_parts(Phase::kColumns, 0, s.stride, kImages);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    in_parts(Phase::kForward, i, s.layers[i].linear.out, kChannels);
    if (!s.is_last(i)) in_parts(Phase::kRows, i, s.stride, kImages);
  }
  *static_cast<T*>(results[0].data_ptr()) = cross_entropy(s, static_cast<const int64_t*>(labels.data_ptr()));
  for (size_t i = s.layers.size() - 1; i-- > 0;) in_parts(Phase::kBackward, i, s.layers[i].linear.out, kChannels);
  in_parts(Phase::kWeights, 0, outputs, kChannels);
  in_parts(Phase::kInputs, 0, s.stride, kLanesOf<T>);
  return results;
}

}  // namespace

std::vector<Tensor> head_training(const Tensor& features, const Tensor& labels, const std::vector<Tensor>& weights,
                                  double slope, double epsilon, bool bf16) {
  if (features.dim() != 2 || features.size(0) < 1 || labels.dim() != 1 || labels.size(0) != features.size(0) ||
      labels.scalar_type() != ScalarType::Long || weights.size() % 3 != 2) {
    fail("head_training: takes features [B, F] with B >= 1, int64 labels [B] and 3 weights per hidden layer and 2 of the "
         "last, got ", shape(features), ", ", shape(labels), " and ", weights.size());
  }
  const int64_t classes = weights[weights.size() - 2].size(0);
  const Tensor dense = torch::stable::contiguous(features), dense_labels = torch::stable::contiguous(labels);
  const auto* first = static_cast<const int64_t*>(dense_labels.data_ptr());
  for (int64_t b = 0; b < dense_labels.size(0); ++b) {
    if (first[b] < -1 || first[b] >= classes) fail("head_training: labels must lie in -1..", classes - 1, ", got ", first[b]);
  }
  const auto of = features.scalar_type() == ScalarType::Double ? compute<double> : compute<float>;
  if (features.scalar_type() == ScalarType::Float || features.scalar_type() == ScalarType::Double) {
    return of(dense, dense_labels, weights, slope, epsilon, bf16);
  }
  fail("head_training: features must be float32 or float64, got ", torch::headeronly::toString(features.scalar_type()));
}

}  // namespace levit
