// Running statistics of batch norms after a batch: numbers so few that a call of torch for each step would cost more than
// they do.
#include "../ops.h"

#include <cstdint>
#include <vector>

#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

template <class T>
void move(const Tensor& running, const Tensor& batch, const T* shift, double scale, double momentum) {
  T* kept = running.mutable_data_ptr<T>();
  const T* found = batch.const_data_ptr<T>();
  for (int64_t i = 0; i < running.numel(); ++i) {
    const T target = found[i] * static_cast<T>(scale) + (shift ? shift[i] : 0);
    kept[i] += (target - kept[i]) * static_cast<T>(momentum);
  }
}

template <class T>
void move_layer(const Tensor& mean, const Tensor& variance, const Tensor& bias, const Tensor& batch_mean,
                const Tensor& batch_variance, double rows, double momentum) {
  move(mean, batch_mean, bias.const_data_ptr<T>(), 1, momentum);
  move<T>(variance, batch_variance, nullptr, rows / (rows - 1), momentum);
}

}  // namespace

void move_statistics(const std::vector<Tensor>& means, const std::vector<Tensor>& variances,
                     const std::vector<Tensor>& counters, const std::vector<Tensor>& biases,
                     const std::vector<Tensor>& statistics, const std::vector<int64_t>& rows, double momentum) {
  const size_t layers = means.size();
  if (variances.size() != layers || counters.size() != layers || biases.size() != layers || rows.size() != layers ||
      statistics.size() != 2 * layers) {
    fail("move_statistics: expected statistics of ", layers, " layers, got ", statistics.size() / 2);
  }
  for (size_t k = 0; k < layers; ++k) {
    const ScalarType dtype = means[k].scalar_type();
    for (const Tensor* tensor : {&means[k], &variances[k], &biases[k], &statistics[2 * k], &statistics[2 * k + 1]}) {
      if (tensor->scalar_type() != dtype || tensor->numel() != means[k].numel() || !tensor->is_contiguous()) {
        fail("move_statistics: expected dense ", torch::headeronly::toString(dtype), " ", shape(means[k]), ", got ",
             torch::headeronly::toString(tensor->scalar_type()), " ", shape(*tensor));
      }
    }
    if (counters[k].scalar_type() != ScalarType::Long || counters[k].numel() != 1) {
      fail("move_statistics: counters must be int64 [], got ", shape(counters[k]));
    }
  }
  for (size_t k = 0; k < layers; ++k) {
    const auto move_as = means[k].scalar_type() == ScalarType::Float ? move_layer<float> : move_layer<double>;
    move_as(means[k], variances[k], biases[k], statistics[2 * k], statistics[2 * k + 1], rows[k], momentum);
    ++*counters[k].mutable_data_ptr<int64_t>();
  }
}

}  // namespace levit
