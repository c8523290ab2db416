// The attention of task tokens over patches: checks, the choice of the vector width, the weights and the tokens' own
// part in the kernel's order, and the cut into groups of images for the threads.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <utility>
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

#define LEVIT_WIDTH(width, target, T, bytes, channels)                              \
  target void pack_##width(const Matrix<T>& weight, int64_t size, T* panels) {      \
    Panels<T, bytes / sizeof(T), channels>::pack(weight, size, size, panels);       \
  }                                                                                 \
  target void run_##width(const Call<T>& call, int64_t first, int64_t images) {     \
    Kernel<T, bytes / sizeof(T), channels>::run(call, first, images);               \
  }
LEVIT_WIDTH(plain, , float, 16, 6)
LEVIT_WIDTH(plain, , double, 16, 6)
#if defined(__x86_64__)
LEVIT_WIDTH(avx2, __attribute__((target("avx2,fma"))), float, 32, 6)
LEVIT_WIDTH(avx2, __attribute__((target("avx2,fma"))), double, 32, 6)
LEVIT_WIDTH(avx512, __attribute__((target("avx512f"))), float, 64, 12)
LEVIT_WIDTH(avx512, __attribute__((target("avx512f"))), double, 64, 12)
#endif
#undef LEVIT_WIDTH

template <class T>
struct Chosen {
  void (*pack)(const Matrix<T>&, int64_t, T*) = pack_plain;
  void (*run)(const Call<T>&, int64_t, int64_t) = run_plain;
  const int64_t lanes = vector_bytes() / sizeof(T);
  Chosen() {
#if defined(__x86_64__)
    if (lanes * sizeof(T) == 64) pack = pack_avx512, run = run_avx512;
    if (lanes * sizeof(T) == 32) pack = pack_avx2, run = run_avx2;
#endif
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
void compute(const Tensor& query, const Tensor& own_scores, const Tensor& own_values, const Tensor& patches,
             const Tensor& wk, const Tensor& wv, const Tensor& wo, const Tensor& bo, const Tensor& out) {
  static const Chosen<T> kernel;
  constexpr T kLog2E = static_cast<T>(1.44269504088896340736);
  const int64_t heads = query.size(0), tokens = query.size(1), depth = query.size(2), width = heads * depth;
  const int64_t batch = patches.size(0), length = patches.size(1);
  const int64_t lanes = round_up(tokens, kernel.lanes), channels = round_up(depth, kernel.lanes);
  const int64_t outputs = round_up(width, kernel.lanes);
  const auto [turned, scores, padded, keys, values, output, no_bias, bias] =
      scratch<T, &compute<T>>({heads * depth * lanes, heads * lanes, heads * tokens * channels, outputs * width,
                               outputs * width, outputs * width, outputs, outputs});
  std::fill(turned, turned + heads * depth * lanes, T(0));
  std::fill(scores, scores + heads * lanes, T(0));
  std::fill(padded, padded + heads * tokens * channels, T(0));
  for (int64_t row = 0; row < heads * tokens; ++row) {
    const int64_t h = row / tokens, t = row % tokens;
    scores[h * lanes + t] = data<T>(own_scores)[row] * kLog2E;
    for (int64_t c = 0; c < depth; ++c) {
      turned[(h * depth + c) * lanes + t] = data<T>(query)[row * depth + c] * kLog2E;
      padded[row * channels + c] = data<T>(own_values)[row * depth + c];
    }
  }
  for (const auto& [weight, panels] : {std::pair{&wk, keys}, std::pair{&wv, values}, std::pair{&wo, output}}) {
    kernel.pack({data<T>(*weight), weight->stride(0), weight->stride(1)}, width, panels);
  }
  std::fill(no_bias, no_bias + outputs, T(0));
  std::fill(bias, bias + outputs, T(0));
  for (int64_t c = 0; c < width; ++c) bias[c] = data<T>(bo)[c * bo.stride(0)];
  const int64_t bytes = (3 * length + tokens) * width * sizeof(T), threads = torch::stable::get_num_threads();
  const int64_t together = std::clamp<int64_t>(kTogether / bytes, 1, (batch + threads - 1) / threads);
  const Call<T> call{heads, tokens, depth, length, data<T>(patches), patches.stride(0), patches.stride(1),
                     patches.stride(2), data<T>(out), together, lanes, channels, turned, scores, padded, keys, values,
                     output, no_bias, bias};
  const int64_t groups = (batch + together - 1) / together;
  torch::stable::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      kernel.run(call, group * together, std::min(together, batch - group * together));
    }
  });
}

}  // namespace

void task_attention(const Tensor& query, const Tensor& own_scores, const Tensor& own_values, const Tensor& patches,
                    const Tensor& wk, const Tensor& wv, const Tensor& wo, const Tensor& bo, const Tensor& out) {
  const ScalarType dtype = query.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double) {
    fail("task_attention: query must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (query.dim() != 3) fail("task_attention: query must be [H, T, d], got ", shape(query));
  if (patches.dim() != 3) fail("task_attention: patches must be [B, N, H * d], got ", shape(patches));
  const int64_t heads = query.size(0), tokens = query.size(1), depth = query.size(2), width = heads * depth;
  const auto check = [&](const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes, bool dense) {
    bool right = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = tensor.size(i) == sizes[i];
    if (!right || (dense && !tensor.is_contiguous())) {
      fail("task_attention: ", name, " must ", dense ? "be dense and " : "", "fit query ", shape(query),
           " and patches ", shape(patches), " in ", torch::headeronly::toString(dtype), ", got ", shape(tensor), " in ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
  };
  check("query", query, {heads, tokens, depth}, true);
  check("own_scores", own_scores, {heads, tokens}, true);
  check("own_values", own_values, {heads, tokens, depth}, true);
  check("patches", patches, {patches.size(0), patches.size(1), width}, false);
  check("wk", wk, {width, width}, false);
  check("wv", wv, {width, width}, false);
  check("wo", wo, {width, width}, false);
  check("bo", bo, {width}, false);
  check("out", out, {patches.size(0), tokens, width}, true);
  if (out.numel() == 0) return;
  if (dtype == ScalarType::Float) {
    compute<float>(query, own_scores, own_values, patches, wk, wv, wo, bo, out);
  } else {
    compute<double>(query, own_scores, own_values, patches, wk, wv, wo, bo, out);
  }
}

}  // namespace levit
