// Equation 6 over stored codes: D_j = mean over the memory of || z_j(x) - z_active(x) ||_2.
#include "../ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "multiversion.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kBlockRows = 256;         // memory samples per task: their query rows stay in L2 while k runs
constexpr int64_t kTaskElements = 1 << 15;  // below this a second thread costs more than it saves
constexpr int kLanes = 8;                   // two such rows of independent sums hide the latency of the add

template <class T>
LEVIT_INLINE void add_squares(T* lanes, const T* codes, const T* query) {
  for (int i = 0; i < kLanes; ++i) {
    const T difference = codes[i] - query[i];
    lanes[i] += difference * difference;
  }
}

// Sum over rows of the Euclidean distance: each row in T, the sum in double, so that a long memory costs no accuracy.
template <class T>
LEVIT_INLINE double sum_of_distances(const T* codes, const T* query, int64_t rows, int64_t length) {
  double total = 0;
  for (int64_t m = 0; m < rows; ++m, codes += length, query += length) {
    T even[kLanes] = {}, odd[kLanes] = {}, squares = 0;
    int64_t l = 0;
    for (; l + 2 * kLanes <= length; l += 2 * kLanes) {
      add_squares(even, codes + l, query + l);
      add_squares(odd, codes + l + kLanes, query + l + kLanes);
    }
    if (l + kLanes <= length) {
      add_squares(even, codes + l, query + l);
      l += kLanes;
    }
    for (; l < length; ++l) {
      const T difference = codes[l] - query[l];
      squares += difference * difference;
    }
    for (int i = 0; i < kLanes; ++i) even[i] += odd[i];
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) even[i] += even[i + width];
    }
    total += std::sqrt(static_cast<double>(squares + even[0]));
  }
  return total;
}

LEVIT_MULTIVERSION double block_sum(const float* codes, const float* query, int64_t rows, int64_t length) {
  return sum_of_distances(codes, query, rows, length);
}

LEVIT_MULTIVERSION double block_sum(const double* codes, const double* query, int64_t rows, int64_t length) {
  return sum_of_distances(codes, query, rows, length);
}

template <class T>
void compute(const T* codes, const T* query, T* distances, int64_t experts, int64_t samples, int64_t length) {
  const int64_t blocks = (samples + kBlockRows - 1) / kBlockRows;
  std::vector<double> sums(experts * blocks);  // added up in one fixed order: the result is the same for any thread count
  const int64_t tasks_per_thread = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, kBlockRows * length));
  torch::stable::parallel_for(0, experts * blocks, tasks_per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t k = task % experts, first = task / experts * kBlockRows;
      const int64_t rows = std::min(kBlockRows, samples - first);
      sums[task] = block_sum(codes + (k * samples + first) * length, query + first * length, rows, length);
    }
  });
  for (int64_t k = 0; k < experts; ++k) {
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += sums[block * experts + k];
    distances[k] = static_cast<T>(total / static_cast<double>(samples));  // no samples: 0 / 0, the NaN of torch's mean
  }
}

}  // namespace

Tensor latent_distance(const Tensor& codes, const Tensor& query) {
  const ScalarType dtype = codes.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double) {
    fail("latent_distance: codes must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (query.scalar_type() != dtype) {
    fail("latent_distance: query must have the dtype of codes, ", torch::headeronly::toString(dtype), ", got ",
         torch::headeronly::toString(query.scalar_type()));
  }
  if (codes.dim() != 3) fail("latent_distance: codes must be [K, M, L], got ", shape(codes));
  if (query.dim() != 2 || query.size(0) != codes.size(1) || query.size(1) != codes.size(2)) {
    fail("latent_distance: query must be [M, L] = [", codes.size(1), ", ", codes.size(2), "] to match codes ",
         shape(codes), ", got ", shape(query));
  }

  const Tensor dense_codes = torch::stable::contiguous(codes), dense_query = torch::stable::contiguous(query);
  const int64_t experts = codes.size(0), samples = codes.size(1), length = codes.size(2);
  Tensor distances = torch::stable::new_empty(codes, {experts});
  if (dtype == ScalarType::Float) {
    compute(dense_codes.const_data_ptr<float>(), dense_query.const_data_ptr<float>(),
            distances.mutable_data_ptr<float>(), experts, samples, length);
  } else {
    compute(dense_codes.const_data_ptr<double>(), dense_query.const_data_ptr<double>(),
            distances.mutable_data_ptr<double>(), experts, samples, length);
  }
  return distances;
}

}  // namespace levit
