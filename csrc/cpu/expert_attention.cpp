// Equations 2-4 and 8 for K experts: checks, the choice of the vector width, and the cut into parts for the threads.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "expert_attention_kernel.h"
#include "vector_width.h"

namespace levit {
namespace {

using namespace attention;
using torch::headeronly::ScalarType;

#define LEVIT_RUN(width, target, T, bytes, channels)                                  \
  target void run_##width(const Call<T>& call, Range images, Range experts, T* out) { \
    Kernel<T, bytes / sizeof(T), channels>::run(call, images, experts, out);          \
  }
LEVIT_EACH_WIDTH(LEVIT_RUN)
#undef LEVIT_RUN

// Of float and double
template <class T>
struct Chosen {
  void (*run)(const Call<T>&, Range, Range, T*);
  const int64_t bytes = vector_bytes(), lanes = bytes / sizeof(T);
  Chosen() { LEVIT_CHOOSE(run, bytes); }
};

template <>
struct Chosen<BFloat16> {
  void (*run)(const Call<BFloat16>&, Range, Range, float*) = run_bf16;
  const int64_t lanes = 16;
};

// Into how many parts images and experts are cut for that many threads: the least work per part, then the fewest parts
// of the experts, whose sums have to be added up.
std::pair<int64_t, int64_t> parts(int64_t tiles, int64_t experts, int64_t threads) {
  const auto share = [](int64_t number, int64_t parts) { return (number + parts - 1) / parts; };
  std::pair<int64_t, int64_t> best{1, 1};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t of_images = std::min(threads, tiles); of_images > 0; --of_images) {
    const int64_t of_experts = std::min(experts, threads / of_images);
    const int64_t work = share(tiles, of_images) * share(experts, of_experts);
    if (work < least) {
      least = work;
      best = {of_images, of_experts};
    }
  }
  return best;
}

// With gates their sum goes to out.
template <class T, class Sum = typename Call<T>::Sum>
void compute(const Call<T>& call, const Tensor& like, Sum* out) {
  static const Chosen<T> kernel;
  const int64_t together = images_per_tile(call.tokens, kernel.lanes);
  const int64_t tiles = (call.batch + together - 1) / together;
  const auto [of_images, of_experts] = parts(tiles, call.experts, torch::stable::get_num_threads());
  const int64_t size = call.batch * call.tokens * call.features();
  const bool sums = call.gates && of_experts > 1;
  Tensor partial;
  Sum* more = nullptr;
  if (sums) {
    partial = torch::stable::new_empty(like, {of_experts - 1, size});
    more = static_cast<Sum*>(partial.data_ptr());
  }
  torch::stable::parallel_for(0, of_images * of_experts, 1, [&, images = of_images, experts = of_experts](
                                                                int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t i = part / experts, e = part % experts;
      const Range of_tiles{tiles * i / images, tiles * (i + 1) / images};
      kernel.run(call, {of_tiles.begin * together, std::min(call.batch, of_tiles.end * together)},
                 {call.experts * e / experts, call.experts * (e + 1) / experts},
                 sums && e ? more + (e - 1) * size : out);
    }
  });
  if (!sums) return;
  for (int64_t e = 0; e + 1 < of_experts; ++e, more += size) {
    for (int64_t i = 0; i < size; ++i) out[i] += more[i];
  }
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

// w [K, inputs, channels...]: whether it is a view of [K, channels..., inputs], dense but for gaps between experts
bool inputs_are_consecutive(const Tensor& w) {
  int64_t stride = 1;
  const auto fits = [&](int64_t dim) {
    const bool fit = w.size(dim) == 1 || w.stride(dim) == stride;
    stride *= w.size(dim);
    return fit;
  };
  bool all = fits(1);
  for (int64_t dim = w.dim() - 1; dim > 1; --dim) all = fits(dim) && all;
  return all;
}

// w as a kernel reads it: where it lies, or copied. Words of bfloat16 need consecutive inputs.
Tensor readable(const Tensor& w) {
  if (inputs_are_consecutive(w)) return w;
  if (w.scalar_type() != ScalarType::BFloat16) return torch::stable::contiguous(w);
  Tensor turned = w;
  for (int64_t dim = 1; dim + 1 < w.dim(); ++dim) turned = torch::stable::transpose(turned, dim, dim + 1);
  turned = torch::stable::contiguous(turned);
  for (int64_t dim = w.dim() - 1; dim > 1; --dim) turned = torch::stable::transpose(turned, dim, dim - 1);
  return turned;
}

template <class T>
Weights<T> weights(const Tensor& w) {
  int64_t channels = 1;
  for (int64_t dim = 2; dim < w.dim(); ++dim) channels *= w.size(dim);
  const int64_t inputs = w.size(1);
  if (inputs_are_consecutive(w)) return {data<T>(w), w.stride(0), inputs, 1};
  return {data<T>(w), inputs * channels, 1, channels};
}

// w [K, inputs, channels..] and b [K, channels..] from channel `first` on
template <class T>
Projection<T> projection(const Tensor& w, const Tensor& b, int64_t first) {
  Projection<T> of{weights<T>(w), data<typename Call<T>::Sum>(b) + first, b.numel() / b.size(0)};
  of.weights.data = of.weights.at(0, first);
  return of;
}

// What both forms have in common: checks, layout, gates. `w_scores` is [K, Q, 3, H, d], or folded [K, Q, H, Q]; then the
// values come by themselves, [K, Q, H, d]. The output goes where `wanted` says, or into a new tensor.
Tensor attend(const char* op, const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed,
              const Tensor& w_scores, const Tensor& b_scores, const Tensor* w_values, const Tensor* b_values,
              const std::optional<Tensor>& gates, double negative_slope, const Tensor* wanted = nullptr) {
  const ScalarType dtype = patches.scalar_type();
  const bool half = dtype == ScalarType::BFloat16;
  const ScalarType sums = half ? ScalarType::Float : dtype;  // of gates too, and of what they weigh
  if (sums != ScalarType::Float && sums != ScalarType::Double) {
    fail(op, ": patches must be bfloat16, float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (patches.dim() != 3) fail(op, ": patches must be [B, N, P], got ", shape(patches));
  const bool folded = w_values;
  if (!folded && (w_scores.dim() != 5 || w_scores.size(2) != 3)) {
    fail(op, ": w_qkv must be [K, Q, 3, H, d], got ", shape(w_scores));
  }
  const Tensor& of_values = folded ? *w_values : w_scores;
  if (folded && of_values.dim() != 4) fail(op, ": w_values must be [K, Q, H, d], got ", shape(of_values));
  const int64_t batch = patches.size(0), tokens = patches.size(1), pixels = patches.size(2);
  const int64_t experts = of_values.size(0), width = of_values.size(1);
  const int64_t heads = of_values.size(folded ? 2 : 3), depth = of_values.size(folded ? 3 : 4);
  const auto check_in = [&](ScalarType wanted, const char* name, const Tensor& tensor,
                            const std::vector<int64_t>& sizes) {
    bool right = tensor.scalar_type() == wanted && tensor.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = tensor.size(i) == sizes[i];
    if (!right) {
      fail(op, ": ", name, " does not fit patches ", shape(patches), " and ", folded ? "w_values " : "w_qkv ",
           shape(of_values), " in ", torch::headeronly::toString(wanted), ", got ", shape(tensor), " in ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
  };
  const auto check = [&](const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
    check_in(dtype, name, tensor, sizes);
  };
  check("w_embed", w_embed, {experts, pixels, width});
  check("b_embed", b_embed, {experts, width});
  if (folded) {
    check("w_scores", w_scores, {experts, width, heads, width});
    check("b_scores", b_scores, {experts, heads, width});
    check("w_values", *w_values, {experts, width, heads, depth});
    check("b_values", *b_values, {experts, heads, depth});
  } else {
    check("b_qkv", b_scores, {experts, 3, heads, depth});
  }
  if (gates) {
    const bool by_image = gates->dim() == 3 && gates->size(0) != 1, by_head = gates->dim() == 3 && gates->size(2) != 1;
    check_in(sums, "gates", *gates, {by_image ? batch : 1, experts, by_head ? heads : 1});
  }

  std::vector<int64_t> sizes{batch, tokens, heads * depth};
  if (!gates) sizes.insert(sizes.begin(), experts);
  const ScalarType of_out = gates ? sums : dtype;
  if (wanted) {
    check_in(of_out, "out", *wanted, sizes);
    const auto follows = [&](int64_t dim, int64_t stride) { return wanted->size(dim) < 2 || wanted->stride(dim) == stride; };
    const int64_t last = wanted->dim() - 1, channels = wanted->size(last);
    if (!follows(last, 1) || !follows(last - 1, channels) || (gates && !wanted->is_contiguous())) {
      fail(op, ": out must be dense in tokens and channels, with gates in images too");
    }
  }
  const Tensor out = wanted ? *wanted : torch::stable::new_empty(patches, sizes, of_out);
  if (out.numel() == 0) return out;
  if (half && !has_bf16_dots()) {
    const auto wide = [](const Tensor& tensor) { return torch::stable::to(tensor, ScalarType::Float); };
    const Tensor wide_values = folded ? wide(*w_values) : out, wide_bias = folded ? wide(*b_values) : out;
    const Tensor found = attend(op, wide(patches), wide(w_embed), wide(b_embed), wide(w_scores), wide(b_scores),
                                folded ? &wide_values : nullptr, folded ? &wide_bias : nullptr, gates, negative_slope);
    Tensor place = out;
    torch::stable::copy_(place, found);
    return out;
  }

  const auto dense = [&](const Tensor& tensor) { return torch::stable::contiguous(torch::stable::to(tensor, sums)); };
  const Tensor dense_b_embed = dense(b_embed), ready_w_embed = readable(w_embed), ready_w_scores = readable(w_scores);
  const Tensor dense_b_scores = dense(b_scores), ready_w_values = folded ? readable(*w_values) : ready_w_scores;
  const Tensor dense_b_values = folded ? dense(*b_values) : dense_b_scores;
  const std::optional<Tensor> dense_gates = gates ? std::optional(dense(*gates)) : std::nullopt;
  const auto run = [&](auto number) {
    using T = decltype(number);
    using Sum = typename Call<T>::Sum;
    const int64_t section = folded ? 0 : heads * depth;
    Call<T> call{experts, batch, tokens, pixels, width, heads, depth, data<T>(patches), patches.stride(0),
                 patches.stride(1), patches.stride(2), weights<T>(ready_w_embed), data<Sum>(dense_b_embed), folded,
                 projection<T>(ready_w_scores, dense_b_scores, 0),
                 projection<T>(ready_w_scores, dense_b_scores, section),
                 projection<T>(ready_w_values, dense_b_values, 2 * section)};
    call.negative_slope = static_cast<Sum>(negative_slope);
    if (!gates) {
      call.out = static_cast<T*>(out.data_ptr());
      call.out_by_expert = out.stride(0);
      call.out_by_image = out.stride(1);
    }
    if (gates) {
      call.gates = data<Sum>(*dense_gates);
      call.gates_per_expert = gates->size(2);
      call.gates_per_image = gates->size(0) == 1 ? 0 : experts * gates->size(2);
    }
    compute(call, dense_b_embed, gates ? static_cast<Sum*>(out.data_ptr()) : nullptr);
  };
  if (half) {
    run(BFloat16{});
  } else if (dtype == ScalarType::Float) {
    run(float{});
  } else {
    run(double{});
  }
  return out;
}

}  // namespace

Tensor expert_attention(const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed, const Tensor& w_qkv,
                        const Tensor& b_qkv, const std::optional<Tensor>& gates, double negative_slope) {
  return attend("expert_attention", patches, w_embed, b_embed, w_qkv, b_qkv, nullptr, nullptr, gates, negative_slope);
}

void folded_attention(const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed, const Tensor& w_scores,
                      const Tensor& b_scores, const Tensor& w_values, const Tensor& b_values,
                      const std::optional<Tensor>& gates, double negative_slope, const Tensor& out) {
  attend("folded_attention", patches, w_embed, b_embed, w_scores, b_scores, &w_values, &b_values, gates, negative_slope,
         &out);
}

}  // namespace levit
