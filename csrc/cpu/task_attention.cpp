// The attention of task tokens over patches: checks, the choice of the vector width, the weights and the tokens' own
// part in the kernel's order, and the cut into groups of images for the threads.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "task_attention_kernel.h"
#include "vector_width.h"

namespace levit {
namespace {

using namespace tasks;
using torch::headeronly::ScalarType;

#define LEVIT_WIDTH(width, target, T, bytes, channels)                                                            \
  target void pack_##width(const Matrix<T>& weight, int64_t size, T* panels) {                                    \
    Panels<T, bytes / sizeof(T), channels>::pack(weight, size, size, panels);                                     \
  }                                                                                                               \
  target void dense_##width(const Matrix<T>& x, int64_t rows, const T* panels, int64_t size, const T* bias, T* y, \
                            int64_t by_row) {                                                                     \
    Panels<T, bytes / sizeof(T), channels>::multiply(x, rows, panels, size, size, bias, y, by_row);               \
  }                                                                                                               \
  target void run_##width(const Call<T>& call, int64_t first, int64_t images) {                                   \
    Kernel<T, bytes / sizeof(T), channels>::run(call, first, images);                                             \
  }
LEVIT_EACH_WIDTH(LEVIT_WIDTH)
#undef LEVIT_WIDTH

template <class T>
struct Chosen {
  void (*pack)(const Matrix<T>&, int64_t, T*);
  Dense<T> dense;
  void (*run)(const Call<T>&, int64_t, int64_t);
  const int64_t bytes = vector_bytes(), lanes = bytes / sizeof(T);
  Chosen() {
    LEVIT_CHOOSE(pack, bytes);
    LEVIT_CHOOSE(dense, bytes);
    LEVIT_CHOOSE(run, bytes);
  }
};

// Bytes of patches, keys, values and sums of the images that a core takes together: most of a small L2 cache, as the
// weights are read once for all of them.
constexpr int64_t kTogether = 768 << 10;

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
Matrix<T> matrix(const Tensor& of) {
  return {data<T>(of), of.stride(0), of.stride(1)};
}

template <class T>
void compute(const Tensor& tokens, const Tensor& patches, const Tensor& wq, const Tensor& wk, const Tensor& wv,
             const Tensor& wo, const Tensor& bo, int64_t heads, double scale, const Tensor& out) {
  static const Chosen<T> kernel;
  const T to_powers_of_2 = static_cast<T>(scale * 1.44269504088896340736);
  const int64_t count = tokens.size(0), width = tokens.size(1), depth = width / heads;
  const int64_t batch = patches.size(0), length = patches.size(1);
  const int64_t lanes = round_up(count, kernel.lanes), channels = round_up(depth, kernel.lanes);
  const int64_t outputs = round_up(width, kernel.lanes), size = outputs * width;
  const auto [queries, scores, values, own, panels, no_bias, bias] =
      scratch<T, &compute<T>>({heads * depth * lanes, heads * lanes, heads * count * channels, 3 * count * width,
                               4 * size, outputs, outputs});
  std::fill(no_bias, no_bias + outputs, T(0));
  std::fill(bias, bias + outputs, T(0));
  for (int64_t c = 0; c < width; ++c) bias[c] = data<T>(bo)[c * bo.stride(0)];
  T* next = panels;
  for (const Tensor* weight : {&wq, &wk, &wv, &wo}) {
    kernel.pack(matrix<T>(*weight), width, next);
    next += size;
  }
  for (int64_t i = 0; i < 3; ++i) {
    kernel.dense(matrix<T>(tokens), count, panels + i * size, width, no_bias, own + i * count * width, width);
  }
  std::fill(queries, queries + heads * depth * lanes, T(0));
  std::fill(scores, scores + heads * lanes, T(0));
  std::fill(values, values + heads * count * channels, T(0));
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < count; ++t) {
      const T *query = own + t * width + h * depth, *key = query + count * width, *value = key + count * width;
      T score = 0;
      for (int64_t c = 0; c < depth; ++c) {
        const T scaled = query[c] * to_powers_of_2;
        score += scaled * key[c];
        queries[(h * depth + c) * lanes + t] = scaled;
      }
      scores[h * lanes + t] = score;
      std::copy(value, value + depth, values + (h * count + t) * channels);
    }
  }
  const int64_t bytes = (3 * length + count) * width * sizeof(T), threads = torch::stable::get_num_threads();
  const int64_t together = std::clamp<int64_t>(kTogether / bytes, 1, (batch + threads - 1) / threads);
  const Call<T> call{kernel.dense, heads, count, depth, length, data<T>(patches), patches.stride(0), patches.stride(1),
                     patches.stride(2), data<T>(out), together, lanes, channels, queries, scores, values,
                     panels + size, panels + 2 * size, panels + 3 * size, no_bias, bias};
  const int64_t groups = (batch + together - 1) / together;
  torch::stable::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      kernel.run(call, group * together, std::min(together, batch - group * together));
    }
  });
}

}  // namespace

void task_attention(const Tensor& tokens, const Tensor& patches, const Tensor& wq, const Tensor& wk, const Tensor& wv,
                    const Tensor& wo, const Tensor& bo, int64_t heads, double scale, const Tensor& out) {
  const ScalarType dtype = tokens.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double) {
    fail("task_attention: tokens must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (tokens.dim() != 2) fail("task_attention: tokens must be [T, D], got ", shape(tokens));
  if (patches.dim() != 3) fail("task_attention: patches must be [B, N, D], got ", shape(patches));
  const int64_t width = tokens.size(1);
  if (heads < 1 || width % heads) fail("task_attention: heads must divide D=", width, ", got ", heads);
  const auto check = [&](const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
    bool right = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = tensor.size(i) == sizes[i];
    if (!right) {
      fail("task_attention: ", name, " must fit tokens ", shape(tokens), " and patches ", shape(patches), " in ",
           torch::headeronly::toString(dtype), ", got ", shape(tensor), " in ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
  };
  check("patches", patches, {patches.size(0), patches.size(1), width});
  check("wq", wq, {width, width});
  check("wk", wk, {width, width});
  check("wv", wv, {width, width});
  check("wo", wo, {width, width});
  check("bo", bo, {width});
  check("out", out, {patches.size(0), tokens.size(0), width});
  if (!out.is_contiguous()) fail("task_attention: out must be dense");
  if (out.numel() == 0) return;
  if (dtype == ScalarType::Float) {
    compute<float>(tokens, patches, wq, wk, wv, wo, bo, heads, scale, out);
  } else {
    compute<double>(tokens, patches, wq, wk, wv, wo, bo, heads, scale, out);
  }
}

}  // namespace levit
