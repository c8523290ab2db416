// Equation 8 over stored features, out[b] = sum_k gate[b,k,h] * features[index[b], k], and the gradient of its gates.
// Both are bound by reading the store: each feature is read once, in memory order, and the gathered rows never written.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dot.h"
#include "multiversion.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

// The sizes of one call, and how many numbers lie between two rows, two experts of the store.
struct Sizes {
  int64_t experts, tokens, heads, depth, row_stride, expert_stride;
  int64_t width() const { return heads * depth; }
};

// Experts that are read side by side: so many streams of reads in flight, and the sums pass through once for all of them.
constexpr int kTogether = 16;

// sum[i] (+)= sum over kRows experts of weight * feature[i]; features lie `stride` apart, weights `heads`
template <int kRows, bool kAdd, class T, class S>
LEVIT_INLINE void sum_scaled(T* sum, const S* features, int64_t stride, const T* weights, int64_t heads, int64_t count) {
  constexpr int kWidth = kLanesOf<T>;
  T weight[kRows];
  for (int k = 0; k < kRows; ++k) weight[k] = weights[k * heads];
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    auto total = kAdd ? load_as<T>(sum + i) : Lanes<T, kWidth>{};
    for (int k = 0; k < kRows; ++k) total += weight[k] * load_as<T>(features + k * stride + i);
    store(sum + i, total);
  }
  for (; i < count; ++i) {
    T total = kAdd ? sum[i] : T(0);
    for (int k = 0; k < kRows; ++k) total += weight[k] * value_as<T>(features[k * stride + i]);
    sum[i] = total;
  }
}

// kRows experts of one image into out [N, E], added to what is there or in its place. A gate of exactly zero drops its
// expert, NaN and all.
template <int kRows, class T, class S>
LEVIT_INLINE void fuse_experts(const S* row, const T* gates, bool add, T* out, const Sizes& n) {
  const T* end = gates + kRows * n.heads;
  const bool all = std::find(gates, end, T(0)) == end;
  if (!all && !add) std::fill(out, out + n.tokens * n.width(), T(0));
  const int64_t parts = n.heads == 1 ? 1 : n.tokens * n.heads, count = n.heads == 1 ? n.tokens * n.depth : n.depth;
  for (int64_t part = 0; part < parts; ++part, row += count, out += count) {
    const T* weights = gates + part % n.heads;
    if (all && add) sum_scaled<kRows, true>(out, row, n.expert_stride, weights, n.heads, count);
    if (all && !add) sum_scaled<kRows, false>(out, row, n.expert_stride, weights, n.heads, count);
    if (all) continue;
    for (int k = 0; k < kRows; ++k) {
      const T* weight = weights + k * n.heads;
      if (*weight != 0) sum_scaled<1, true>(out, row + k * n.expert_stride, 0, weight, 0, count);
    }
  }
}

// One image: out [N, E] from its row of the store, kRows experts at a time and the rest together.
template <int kRows, class T, class S>
LEVIT_INLINE void fuse_row(const S* row, const T* gates, bool add, T* out, const Sizes& n, int64_t k = 0) {
  for (; k + kRows <= n.experts; k += kRows) {
    fuse_experts<kRows>(row + k * n.expert_stride, gates + k * n.heads, add || k > 0, out, n);
  }
  if constexpr (kRows > 1) fuse_row<kRows - 1>(row, gates, add, out, n, k);
}

// One image: by_gate [K, H] = <grad, features> head by head.
template <int kRows, class T, class S>
LEVIT_INLINE void dot_row(const S* row, const T* grad, T* by_gate, const Sizes& n, int64_t k = 0) {
  const int64_t parts = n.heads == 1 ? 1 : n.tokens * n.heads, count = n.heads == 1 ? n.tokens * n.depth : n.depth;
  for (; k + kRows <= n.experts; k += kRows) {
    for (int64_t part = 0; part < parts; ++part) {
      const S* features = row + k * n.expert_stride + part * count;
      T* sums = by_gate + k * n.heads + part % n.heads;
      add_dots<kRows>(grad + part * count, features, n.expert_stride, sums, n.heads, count);
    }
  }
  if constexpr (kRows > 1) dot_row<kRows - 1>(row, grad, by_gate, n, k);
}

#define LEVIT_DKF_ROWS(T, S)                                                                       \
  LEVIT_MULTIVERSION void fused(const S* row, const T* gates, bool add, T* out, const Sizes& n) {  \
    fuse_row<kTogether>(row, gates, add, out, n);                                                  \
  }                                                                                                \
  LEVIT_MULTIVERSION void dots(const S* row, const T* grad, T* by_gate, const Sizes& n) {          \
    std::fill(by_gate, by_gate + n.experts * n.heads, T(0));                                       \
    dot_row<kTogether>(row, grad, by_gate, n);                                                     \
  }
LEVIT_DKF_ROWS(float, float)
LEVIT_DKF_ROWS(float, BFloat16)
LEVIT_DKF_ROWS(double, double)
#undef LEVIT_DKF_ROWS

struct Call {
  Sizes sizes;
  int64_t batch;
  std::vector<int64_t> rows;
};

// features [M, K, N, E] whose rows [N, E] are dense; index [B] int64 or none; `heads` gates per expert
Call prepare(const Tensor& features, const std::optional<Tensor>& index, int64_t heads) {
  if (features.dim() != 4) fail("dkf_fuse: features must be [M, K, N, E], got ", shape(features));
  const int64_t width = features.size(3);
  if ((width > 1 && features.stride(3) != 1) || (features.size(2) > 1 && features.stride(2) != width)) {
    fail("dkf_fuse: each expert's features [N, E] must be dense in memory, got strides of N, E ", features.stride(2),
         ", ", features.stride(3));
  }
  if (heads < 1 || width % heads != 0) fail("dkf_fuse: gates have ", heads, " heads, which do not divide E = ", width);
  Call call{{features.size(1), features.size(2), heads, width / heads, features.stride(0), features.stride(1)}, 0, {}};
  if (!index) {
    call.batch = features.size(0);
    for (int64_t b = 0; b < call.batch; ++b) call.rows.push_back(b);
    return call;
  }
  if (index->dim() != 1 || index->scalar_type() != ScalarType::Long) fail("dkf_fuse: index must be int64 [B]");
  const Tensor dense = torch::stable::contiguous(*index);
  const auto* first = dense.const_data_ptr<int64_t>();
  call.batch = dense.numel();
  call.rows.assign(first, first + call.batch);
  for (const int64_t row : call.rows) {
    if (row < 0 || row >= features.size(0)) {
      fail("dkf_fuse: index must lie in [0, M = ", features.size(0), "), got ", row);
    }
  }
  return call;
}

// Calls work(types) with the tensors' types: sums in T, the store in S.
template <class Work>
void with_types(const Tensor& features, ScalarType sums, const Work& work) {
  const ScalarType store = features.scalar_type();
  if (sums == ScalarType::Double && store == ScalarType::Double) {
    work(double{}, double{});
  } else if (sums == ScalarType::Float && store == ScalarType::Float) {
    work(float{}, float{});
  } else if (sums == ScalarType::Float && store == ScalarType::BFloat16) {
    work(float{}, BFloat16{});
  } else {
    fail("dkf_fuse: takes float32 or bfloat16 features with float32 gates, or float64 both, got ",
         torch::headeronly::toString(store), " and ", torch::headeronly::toString(sums));
  }
}

Call prepare(const Tensor& features, const Tensor& gates, const std::optional<Tensor>& index) {
  if (gates.dim() != 3 || gates.size(1) != features.size(1)) {
    fail("dkf_fuse: gates must be [B or 1, K, H or 1], got ", shape(gates), " for features ", shape(features));
  }
  Call call = prepare(features, index, gates.size(2));
  if (gates.size(0) != 1 && gates.size(0) != call.batch) fail("dkf_fuse: gates are for ", gates.size(0), " images");
  return call;
}

void fuse(const Tensor& features, const Tensor& gates, const Call& call, bool add, const Tensor& out) {
  const Sizes& n = call.sizes;
  const Tensor dense_gates = torch::stable::contiguous(gates);
  const int64_t gate_stride = gates.size(0) == 1 ? 0 : n.experts * n.heads, count = n.tokens * n.width();
  with_types(features, gates.scalar_type(), [&](auto sum, auto stored) {
    using T = decltype(sum);
    const auto* store = static_cast<const decltype(stored)*>(features.data_ptr());
    const auto* weights = static_cast<const T*>(dense_gates.data_ptr());
    auto* to = static_cast<T*>(out.data_ptr());
    torch::stable::parallel_for(0, call.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        fused(store + call.rows[b] * n.row_stride, weights + b * gate_stride, add, to + b * count, n);
      }
    });
  });
}

}  // namespace

Tensor dkf_fuse(const Tensor& features, const Tensor& gates, const std::optional<Tensor>& index) {
  const Call call = prepare(features, gates, index);
  if (call.sizes.experts < 1) fail("dkf_fuse: takes at least one expert, got features ", shape(features));
  Tensor out = torch::stable::new_empty(gates, {call.batch, call.sizes.tokens, call.sizes.width()});
  fuse(features, gates, call, false, out);
  return out;
}

void add_dkf_fuse(const Tensor& features, const Tensor& gates, const std::optional<Tensor>& index, const Tensor& out) {
  const Call call = prepare(features, gates, index);
  if (out.scalar_type() != gates.scalar_type() || out.dim() != 3 || out.size(0) != call.batch || !out.is_contiguous() ||
      out.size(1) != call.sizes.tokens || out.size(2) != call.sizes.width()) {
    fail("dkf_fuse: out must be dense, [", call.batch, ", ", call.sizes.tokens, ", ", call.sizes.width(), "], got ",
         shape(out));
  }
  fuse(features, gates, call, true, out);
}

Tensor dkf_fuse_gate_gradient(const Tensor& grad, const Tensor& features, const std::optional<Tensor>& index,
                              int64_t heads) {
  const Call call = prepare(features, index, heads);
  const Sizes& n = call.sizes;
  if (grad.dim() != 3 || grad.size(0) != call.batch || grad.size(1) != n.tokens || grad.size(2) != n.width()) {
    fail("dkf_fuse: grad must be [", call.batch, ", ", n.tokens, ", ", n.width(), "], got ", shape(grad));
  }
  const Tensor dense = torch::stable::contiguous(grad);
  Tensor by_gate = torch::stable::new_empty(grad, {call.batch, n.experts, n.heads});
  with_types(features, grad.scalar_type(), [&](auto sum, auto stored) {
    using T = decltype(sum);
    const auto* store = static_cast<const decltype(stored)*>(features.data_ptr());
    const auto* from = static_cast<const T*>(dense.data_ptr());
    auto* to = static_cast<T*>(by_gate.data_ptr());
    torch::stable::parallel_for(0, call.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        dots(store + call.rows[b] * n.row_stride, from + b * n.tokens * n.width(), to + b * n.experts * n.heads, n);
      }
    });
  });
  return by_gate;
}

}  // namespace levit
