// The attention of task tokens over projected patches: checks, the choice of the vector width, the tokens' own part in
// the kernel's order, and the cut into parts for the threads.
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

#define LEVIT_RUN(name, target, T, bytes, channels)                          \
  target void name(const Call<T>& call, int64_t begin, int64_t end) {        \
    Kernel<T, bytes / sizeof(T), channels>::run(call, begin, end);           \
  }
LEVIT_RUN(run_plain, , float, 16, 6)
LEVIT_RUN(run_plain, , double, 16, 6)
#if defined(__x86_64__)
LEVIT_RUN(run_avx2, __attribute__((target("avx2,fma"))), float, 32, 6)
LEVIT_RUN(run_avx2, __attribute__((target("avx2,fma"))), double, 32, 6)
LEVIT_RUN(run_avx512, __attribute__((target("avx512f"))), float, 64, 12)
LEVIT_RUN(run_avx512, __attribute__((target("avx512f"))), double, 64, 12)
#endif
#undef LEVIT_RUN

template <class T>
struct Chosen {
  void (*run)(const Call<T>&, int64_t, int64_t) = run_plain;
  const int64_t lanes = vector_bytes() / sizeof(T);
  Chosen() {
#if defined(__x86_64__)
    if (lanes * sizeof(T) == 64) run = run_avx512;
    if (lanes * sizeof(T) == 32) run = run_avx2;
#endif
  }
};

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
Projection<T> projection(const Tensor& of) {
  return {data<T>(of), of.stride(0), of.stride(1), of.stride(2), of.stride(3)};
}

template <class T>
void compute(const Tensor& query, const Tensor& own_scores, const Tensor& own_values, const Tensor& keys,
             const Tensor& values, const Tensor& out) {
  static const Chosen<T> kernel;
  constexpr T kLog2E = static_cast<T>(1.44269504088896340736);
  const int64_t heads = query.size(0), tokens = query.size(1), depth = query.size(2);
  const int64_t lanes = round_up(tokens, kernel.lanes), channels = round_up(depth, kernel.lanes);
  const auto [turned, scores, padded] =
      scratch<T, &compute<T>>({heads * depth * lanes, heads * lanes, heads * tokens * channels});
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
  const Call<T> call{heads, tokens, depth, keys.size(1), projection<T>(keys), projection<T>(values), data<T>(out),
                     lanes, channels, turned, scores, padded};
  torch::stable::parallel_for(0, keys.size(0) * heads, 1,
                              [&](int64_t begin, int64_t end) { kernel.run(call, begin, end); });
}

}  // namespace

void task_attention(const Tensor& query, const Tensor& own_scores, const Tensor& own_values, const Tensor& keys,
                    const Tensor& values, const Tensor& out) {
  const ScalarType dtype = query.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double) {
    fail("task_attention: query must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (query.dim() != 3) fail("task_attention: query must be [H, T, d], got ", shape(query));
  if (keys.dim() != 4) fail("task_attention: keys must be [B, N, H, d], got ", shape(keys));
  const int64_t heads = query.size(0), tokens = query.size(1), depth = query.size(2);
  const auto check = [&](const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes, bool dense) {
    bool right = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = tensor.size(i) == sizes[i];
    if (!right || (dense && !tensor.is_contiguous())) {
      fail("task_attention: ", name, " must ", dense ? "be dense and " : "", "fit query ", shape(query), " and keys ",
           shape(keys), " in ", torch::headeronly::toString(dtype), ", got ", shape(tensor), " in ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
  };
  check("query", query, {heads, tokens, depth}, true);
  check("own_scores", own_scores, {heads, tokens}, true);
  check("own_values", own_values, {heads, tokens, depth}, true);
  check("keys", keys, {keys.size(0), keys.size(1), heads, depth}, false);
  check("values", values, {keys.size(0), keys.size(1), heads, depth}, false);
  check("out", out, {keys.size(0), tokens, heads, depth}, true);
  if (out.numel() == 0) return;
  if (dtype == ScalarType::Float) {
    compute<float>(query, own_scores, own_values, keys, values, out);
  } else {
    compute<double>(query, own_scores, own_values, keys, values, out);
  }
}

}  // namespace levit
