// The classifier's loss of the expert in training and all its gradients in one call. Its large parts are the ops of their
// own names; here stand batch norm, folded into the patch embedding, the way there and the way back.
#include "../ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dense_training.h"
#include "scratch.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::new_empty;
using torch::stable::view;

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// out [rows, columns] = w [rows, inputs] x, cut into rows for the threads
template <class T>
void multiply(Product<T> of, int64_t rows, int64_t columns, T* out) {
  constexpr int64_t kRows = DenseTraining<T>::kChannels;
  torch::stable::parallel_for(0, (rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    Product<T> part = of;
    part.w += begin * kRows * of.by_channel;
    multiply_rows(part, std::min(rows, end * kRows) - begin * kRows, columns, out + begin * kRows * columns);
  });
}

// The mean [columns] of x [rows, columns], and x without it
template <class T>
LEVIT_INLINE void centre(const T* x, int64_t rows, int64_t columns, double* sums, T* mean, T* centred) {
  std::fill(sums, sums + columns, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; ++i) sums[i] += x[r * columns + i];
  }
  for (int64_t i = 0; i < columns; ++i) mean[i] = static_cast<T>(sums[i] / static_cast<double>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; ++i) centred[r * columns + i] = x[r * columns + i] - mean[i];
  }
}

LEVIT_MULTIVERSION void centre_rows(const float* x, int64_t rows, int64_t columns, double* sums, float* mean,
                                    float* centred) {
  centre(x, rows, columns, sums, mean, centred);
}

LEVIT_MULTIVERSION void centre_rows(const double* x, int64_t rows, int64_t columns, double* sums, double* mean,
                                    double* centred) {
  centre(x, rows, columns, sums, mean, centred);
}

// Batch norm behind x w^T, folded into w: mean and variance of x w^T follow from mean and covariance of x ([D], SPEC.md,
// Modes). folded = w scale and bias = shift - center scale with scale = gain / sqrt(variance + epsilon).
struct Fold {
  Tensor folded, bias;      // [Q, P], [Q]
  Tensor mean, covariant;   // of x [P]; the covariance of x and x w^T [Q, P]
  Tensor center, variance;  // of x w^T [Q]
};

template <class T>
Fold fold_batch_norm(const Tensor& x, int64_t rows, const Tensor& weight, const Tensor& gain, const Tensor& shift,
                     double epsilon) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const auto empty = [&](const std::vector<int64_t>& sizes) { return new_empty(weight, sizes); };
  Fold fold{empty({outputs, inputs}), empty({outputs}), empty({inputs}), empty({outputs, inputs}), empty({outputs}),
            empty({outputs})};
  const T* w = data<T>(weight);
  const auto [centred, covariance] = scratch<T, &fold_batch_norm<T>>({rows * inputs, inputs * inputs});
  std::vector<double> sums(inputs);
  T* mean = data<T>(fold.mean);
  centre_rows(data<T>(x), rows, inputs, sums.data(), mean, centred);
  multiply<T>({centred, 1, inputs, centred, inputs, rows}, inputs, inputs, covariance);
  for (int64_t i = 0; i < inputs * inputs; ++i) covariance[i] /= static_cast<T>(rows);
  T* covariant = data<T>(fold.covariant);
  multiply<T>({w, inputs, 1, covariance, inputs, inputs}, outputs, inputs, covariant);
  for (int64_t q = 0; q < outputs; ++q) {
    T variance = 0, center = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      variance += w[q * inputs + i] * covariant[q * inputs + i];
      center += w[q * inputs + i] * mean[i];
    }
    const T scale = data<T>(gain)[q] / std::sqrt(variance + static_cast<T>(epsilon));
    for (int64_t i = 0; i < inputs; ++i) data<T>(fold.folded)[q * inputs + i] = w[q * inputs + i] * scale;
    data<T>(fold.bias)[q] = data<T>(shift)[q] - center * scale;
    data<T>(fold.center)[q] = center, data<T>(fold.variance)[q] = variance;
  }
  return fold;
}

// Gradients of the folded weight and bias become those of weight, where the folded one's was, and gain.
template <class T>
Tensor unfold_batch_norm(const Fold& fold, const Tensor& weight, const Tensor& gain, double epsilon, const Tensor& by_folded,
                         const Tensor& by_bias) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  Tensor by_gain = torch::stable::empty_like(gain);
  const T* mean = data<T>(fold.mean);
  for (int64_t q = 0; q < outputs; ++q) {
    const T *w = data<T>(weight) + q * inputs, *covariant = data<T>(fold.covariant) + q * inputs;
    T* by = data<T>(by_folded) + q * inputs;
    const T deviation = 1 / std::sqrt(data<T>(fold.variance)[q] + static_cast<T>(epsilon));
    const T scale = data<T>(gain)[q] * deviation, by_shift = data<T>(by_bias)[q];
    T by_scale = -by_shift * data<T>(fold.center)[q];
    for (int64_t i = 0; i < inputs; ++i) by_scale += by[i] * w[i];
    const T by_mean = by_shift * scale, by_half_variance = by_scale * scale * deviation * deviation;
    for (int64_t i = 0; i < inputs; ++i) by[i] = by[i] * scale - by_mean * mean[i] - by_half_variance * covariant[i];
    data<T>(by_gain)[q] = by_scale * deviation;
  }
  return by_gain;
}

// The gradient of the gates [K, H or 1] from those of every image: of the stored experts [B, K - 1, H or 1], and of the
// expert's own [B, H].
template <class T>
Tensor sum_over_images(const Tensor& gates, const std::optional<Tensor>& of_stored, const Tensor& of_own) {
  const int64_t batch = of_own.size(0), heads = of_own.size(1), columns = gates.size(1);
  const int64_t stored = (gates.size(0) - 1) * columns;
  Tensor sums = torch::stable::empty_like(gates);
  T* to = data<T>(sums);
  std::fill(to, to + stored + columns, T(0));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < stored; ++i) to[i] += data<T>(*of_stored)[b * stored + i];
    for (int64_t h = 0; h < heads; ++h) to[stored + (columns == 1 ? 0 : h)] += data<T>(of_own)[b * heads + h];
  }
  return sums;
}

struct Arguments {
  const Tensor &patches, &labels;
  const std::vector<Tensor>&attention, &head;
  const std::optional<Tensor>&gates, &features, &index;
  int64_t heads;
  double slope, epsilon;
  bool bf16;
};

template <class T>
std::vector<Tensor> compute(const Arguments& of) {
  const int64_t batch = of.patches.size(0), tokens = of.patches.size(1);
  const Tensor &weight = of.attention[0], &gain = of.attention[1], &shift = of.attention[2];
  const int64_t width = weight.size(0), features = of.attention[3].size(0) / 3, depth = features / of.heads;
  const Fold folded = fold_batch_norm<T>(of.patches, batch * tokens, weight, gain, shift, of.epsilon);
  const Tensor w_qkv = view(of.attention[3], {3, of.heads, depth, width});
  const Tensor b_qkv = view(of.attention[4], {3, of.heads, depth});
  std::optional<Tensor> own_gate, stored_gates, by_stored;
  if (of.gates) {
    Tensor gates = *of.gates;
    const int64_t stored = gates.size(0) - 1;
    own_gate = torch::stable::narrow(gates, 0, stored, 1);
    stored_gates = view(torch::stable::narrow(gates, 0, 0, stored), {1, stored, gates.size(1)});
  }

  std::vector<Tensor> kept =
      expert_attention_train(of.patches, folded.folded, folded.bias, w_qkv, b_qkv, own_gate, of.slope, of.bf16);
  const Tensor fused = kept[0];
  kept.erase(kept.begin());
  if (of.features) add_dkf_fuse(*of.features, *stored_gates, of.index, fused);
  std::vector<Tensor> head =
      head_training(view(fused, {batch, tokens * features}), of.labels, of.head, of.slope, of.epsilon, of.bf16);
  const Tensor by_fused = view(head[1], {batch, tokens, features});
  if (of.features) by_stored = dkf_fuse_gate_gradient(by_fused, *of.features, of.index, of.gates->size(1));
  const std::vector<Tensor> back = expert_attention_train_backward(by_fused, of.patches, folded.folded, folded.bias,
                                                                   w_qkv, b_qkv, own_gate, of.slope, kept, false, of.bf16);
  const Tensor &by_weight = back[1], &by_shift = back[2], &by_b_qkv = back[4];
  const Tensor by_gain = unfold_batch_norm<T>(folded, weight, gain, of.epsilon, by_weight, by_shift);
  // Batch norm in the head takes the values' bias out again: its exact gradient, not the rounding errors in its place.
  if (of.head.size() > 2) std::fill(data<T>(by_b_qkv) + 2 * features, data<T>(by_b_qkv) + 3 * features, T(0));

  std::vector<Tensor> results{head[0], by_weight, by_gain, by_shift, view(back[3], {3 * features, width}),
                              view(by_b_qkv, {3 * features})};
  const auto statistics = head.begin() + 2 + static_cast<int64_t>(of.head.size());
  results.insert(results.end(), head.begin() + 2, statistics);
  if (of.gates) results.push_back(sum_over_images<T>(*of.gates, by_stored, back[5]));
  results.push_back(folded.center);
  results.push_back(folded.variance);
  results.insert(results.end(), statistics, head.end());
  return results;
}

void check(const Arguments& of) {
  const ScalarType dtype = of.patches.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double) {
    fail("expert_training: patches must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (of.patches.dim() != 3 || of.patches.size(0) < 1 || of.patches.size(1) < 1 || of.attention.size() != 5 ||
      of.attention[0].dim() != 2 || of.heads < 1) {
    fail("expert_training: takes patches [B, N, P] with B, N >= 1 and 5 tensors of attention, the first [Q, P], got ",
         shape(of.patches), " and ", of.attention.size());
  }
  const int64_t width = of.attention[0].size(0), rows = of.attention[3].dim() ? of.attention[3].size(0) : 0;
  const auto fits = [&](const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
    bool right = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = tensor.size(i) == sizes[i];
    if (!right || !tensor.is_contiguous()) {
      fail("expert_training: ", name, " must be dense and fit patches ", shape(of.patches), ", ", of.heads,
           " heads and the other arguments, got ", shape(tensor));
    }
  };
  fits("patches", of.patches, {of.patches.size(0), of.patches.size(1), of.patches.size(2)});
  fits("w_embed", of.attention[0], {width, of.patches.size(2)});
  fits("gain", of.attention[1], {width});
  fits("shift", of.attention[2], {width});
  fits("w_qkv", of.attention[3], {rows / (3 * of.heads) * 3 * of.heads, width});
  fits("b_qkv", of.attention[4], {rows});
  if (of.gates) {
    const bool by_head = of.gates->dim() == 2 && of.gates->size(1) != 1;
    fits("gates", *of.gates, {of.features ? of.features->size(1) + 1 : 1, by_head ? of.heads : 1});
  } else if (of.features) {
    fail("expert_training: features need gates");
  }
}

}  // namespace

std::vector<Tensor> expert_training(const Tensor& patches, const Tensor& labels, const std::vector<Tensor>& attention,
                                    const std::vector<Tensor>& head, const std::optional<Tensor>& gates,
                                    const std::optional<Tensor>& features, const std::optional<Tensor>& index,
                                    int64_t heads, double negative_slope, double epsilon, bool bf16) {
  const Arguments of{patches, labels, attention, head, gates, features, index, heads, negative_slope, epsilon, bf16};
  check(of);
  return patches.scalar_type() == ScalarType::Float ? compute<float>(of) : compute<double>(of);
}

}  // namespace levit
