// Equations 2-4 for the one expert in training, forward and backward: checks, the choice of the vector width, memory for
// what passes between the phases, and the cut of each phase into parts for the threads. No phase adds up what threads
// computed apart, so the result does not depend on their number.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "expert_attention_training_kernel.h"
#include "vector_width.h"

namespace levit {
namespace {

using namespace attention;
using torch::headeronly::ScalarType;

#define LEVIT_RUN(width, target, T, bytes, channels)                           \
  target void run_##width(const Training<T>& step, Phase phase, Range range) { \
    TrainingKernel<T, bytes / sizeof(T), channels>::run(step, phase, range);   \
  }
LEVIT_EACH_WIDTH(LEVIT_RUN)
#undef LEVIT_RUN

template <class T>
struct Chosen {
  void (*run)(const Training<T>&, Phase, Range);
  const int64_t bytes = vector_bytes(), lanes = bytes / sizeof(T);
  Chosen() { LEVIT_CHOOSE(run, bytes); }

  // One phase over [0, count), cut between multiples of `together`.
  void operator()(const Training<T>& step, Phase phase, int64_t count, int64_t together = 1) const {
    const int64_t parts = (count + together - 1) / together;
    torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      const Range range{begin * together, std::min(count, end * together)};
      if constexpr (std::is_same_v<T, float>) {
        if (step.bf16) return run_bf16(step, phase, range);
      }
      run(step, phase, range);
    });
  }
};

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

struct Arguments {
  const Tensor &patches, &w_embed, &b_embed, &w_qkv, &b_qkv;
  const std::optional<Tensor>& gates;
  double negative_slope;
  bool bf16;
};

void check(const Arguments& of) {
  const ScalarType dtype = of.patches.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double) {
    fail("expert_attention: patches must be float32 or float64, got ", torch::headeronly::toString(dtype));
  }
  if (of.patches.dim() != 3) fail("expert_attention: patches must be [B, N, P], got ", shape(of.patches));
  if (of.w_qkv.dim() != 4 || of.w_qkv.size(0) != 3) {
    fail("expert_attention: w_qkv must be [3, H, d, Q], got ", shape(of.w_qkv));
  }
  const int64_t heads = of.w_qkv.size(1), depth = of.w_qkv.size(2), width = of.w_qkv.size(3);
  const auto fits = [&](const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
    bool right = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = tensor.size(i) == sizes[i];
    if (!right || !tensor.is_contiguous()) {
      fail("expert_attention: ", name, " must be dense and fit patches ", shape(of.patches), " and w_qkv ",
           shape(of.w_qkv), " in ", torch::headeronly::toString(dtype), ", got ", shape(tensor), " in ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
  };
  fits("patches", of.patches, {of.patches.size(0), of.patches.size(1), of.patches.size(2)});
  fits("w_embed", of.w_embed, {width, of.patches.size(2)});
  fits("b_embed", of.b_embed, {width});
  fits("w_qkv", of.w_qkv, {3, heads, depth, width});
  fits("b_qkv", of.b_qkv, {3, heads, depth});
  if (of.gates) {
    const bool by_image = of.gates->dim() == 2 && of.gates->size(0) != 1;
    const bool by_head = of.gates->dim() == 2 && of.gates->size(1) != 1;
    fits("gates", *of.gates, {by_image ? of.patches.size(0) : 1, by_head ? heads : 1});
  }
}

// The sizes and the arguments, and w and b as they are.
template <class T>
Training<T> prepare(const Arguments& of) {
  Training<T> step{};
  step.batch = of.patches.size(0), step.tokens = of.patches.size(1), step.pixels = of.patches.size(2);
  step.heads = of.w_qkv.size(1), step.depth = of.w_qkv.size(2), step.width = of.w_qkv.size(3);
  step.slope = static_cast<T>(of.negative_slope);
  step.bf16 = rounds_factors<T>(of.bf16);
  step.folded = folding_saves<T>(step.batch * step.tokens, step.width, step.heads, step.depth);
  step.patches = data<T>(of.patches);
  step.w_embed = data<T>(of.w_embed), step.b_embed = data<T>(of.b_embed);
  step.w_qkv = data<T>(of.w_qkv), step.b_qkv = data<T>(of.b_qkv);
  if (of.gates) {
    step.gates = data<T>(*of.gates);
    step.gates_per_head = of.gates->size(1) != 1;
    step.gates_per_image = of.gates->size(0) != 1 ? of.gates->size(1) : 0;
  }
  step.w = data<T>(of.w_qkv), step.b = data<T>(of.b_qkv), step.w_stride = step.width;
  return step;
}

template <class T>
void fold(Training<T>& step, const Chosen<T>& kernel) {
  if (!step.folded) return;
  step.w_stride = round_up(step.width, kernel.lanes);
  const auto [w, b] = scratch<T, Phase::kFold>({step.rows() * step.w_stride, step.rows()});
  step.w = w, step.b = b;
  kernel(step, Phase::kFold, step.heads);
}

template <class T>
void forward(const Arguments& of, const std::vector<Tensor>& results) {
  static const Chosen<T> kernel;
  Training<T> step = prepare<T>(of);
  step.out = data<T>(results[0]);
  step.kept_tokens = data<T>(results[1]), step.kept_projections = data<T>(results[2]);
  step.kept_probabilities = data<T>(results[3]);
  fold(step, kernel);
  kernel(step, Phase::kForward, step.batch, images_per_tile(step.tokens, kernel.lanes));
}

template <class T>
void backward(const Arguments& of, const Tensor& grad, const std::vector<Tensor>& kept, bool needs_patches,
              const std::vector<Tensor>& results) {
  static const Chosen<T> kernel;
  Training<T> step = prepare<T>(of);
  step.grad = data<T>(grad);
  step.kept_tokens = data<T>(kept[0]), step.kept_projections = data<T>(kept[1]);
  step.kept_probabilities = data<T>(kept[2]);
  step.by_patches = needs_patches ? data<T>(results[0]) : nullptr;
  step.by_w_embed = data<T>(results[1]), step.by_b_embed = data<T>(results[2]);
  step.by_w_qkv = data<T>(results[3]), step.by_b_qkv = data<T>(results[4]), step.by_gates = data<T>(results[5]);
  fold(step, kernel);
  const int64_t all = step.batch * step.tokens, panel = 2 * kernel.lanes;
  const int64_t panels = (step.rows() + panel - 1) / panel, embed_panels = (step.width + panel - 1) / panel;
  step.panel_rows = all + panel;  // powers of two apart, panels would share the cache's sets
  const auto [of_projections, of_embedding, token_rows, by_w, by_b] =
      scratch<T, &backward<T>>({panels * panel * step.panel_rows, embed_panels * panel * step.panel_rows,
                                all * round_up(step.width, kernel.lanes), step.folded ? step.rows() * step.w_stride : 0,
                                step.folded ? step.rows() : 0});
  step.panels = of_projections, step.embed_panels = of_embedding, step.token_rows = token_rows;
  step.by_w = step.folded ? by_w : step.by_w_qkv, step.by_b = step.folded ? by_b : step.by_b_qkv;
  kernel(step, Phase::kBackward, step.batch, images_per_tile(step.tokens, kernel.lanes));
  kernel(step, Phase::kWeights, panels + embed_panels);
  if (step.folded) kernel(step, Phase::kUnfold, step.heads);
}

}  // namespace

std::vector<Tensor> expert_attention_train(const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed,
                                           const Tensor& w_qkv, const Tensor& b_qkv, const std::optional<Tensor>& gates,
                                           double negative_slope, bool bf16) {
  const Arguments of{patches, w_embed, b_embed, w_qkv, b_qkv, gates, negative_slope, bf16};
  check(of);
  const int64_t batch = patches.size(0), tokens = patches.size(1), width = w_embed.size(0);
  const int64_t heads = w_qkv.size(1), depth = w_qkv.size(2);
  const auto empty = [&](const std::vector<int64_t>& sizes) { return torch::stable::new_empty(patches, sizes); };
  std::vector<Tensor> results{empty({batch, tokens, heads * depth}), empty({batch, tokens, width}),
                              empty({batch, tokens, 3, heads, depth}), empty({heads, batch, tokens, tokens})};
  if (patches.scalar_type() == ScalarType::Float) {
    forward<float>(of, results);
  } else {
    forward<double>(of, results);
  }
  return results;
}

std::vector<Tensor> expert_attention_train_backward(const Tensor& grad, const Tensor& patches, const Tensor& w_embed,
                                                    const Tensor& b_embed, const Tensor& w_qkv, const Tensor& b_qkv,
                                                    const std::optional<Tensor>& gates, double negative_slope,
                                                    const std::vector<Tensor>& kept, bool needs_patches, bool bf16) {
  const Arguments of{patches, w_embed, b_embed, w_qkv, b_qkv, gates, negative_slope, bf16};
  check(of);
  const int64_t batch = patches.size(0), tokens = patches.size(1), width = w_embed.size(0);
  const int64_t heads = w_qkv.size(1), depth = w_qkv.size(2);
  const std::vector<int64_t> sizes{batch * tokens * heads * depth, batch * tokens * width,
                                   3 * batch * tokens * heads * depth, heads * batch * tokens * tokens};
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i && kept.size() != 3) fail("expert_attention: the backward pass takes 3 kept tensors, got ", kept.size());
    const Tensor& tensor = i ? kept[i - 1] : grad;
    if (tensor.scalar_type() != patches.scalar_type() || tensor.numel() != sizes[i] || !tensor.is_contiguous()) {
      fail("expert_attention: ", i ? "a kept tensor" : "grad", " must be dense with ", sizes[i], " numbers, got ",
           shape(tensor));
    }
  }
  const auto like = [](const Tensor& tensor) { return torch::stable::empty_like(tensor); };
  std::vector<Tensor> results{needs_patches ? like(patches) : torch::stable::new_empty(patches, {0}),
                              like(w_embed), like(b_embed), like(w_qkv), like(b_qkv),
                              torch::stable::new_empty(patches, {batch, heads})};
  if (patches.scalar_type() == ScalarType::Float) {
    backward<float>(of, grad, kept, needs_patches, results);
  } else {
    backward<double>(of, grad, kept, needs_patches, results);
  }
  return results;
}

}  // namespace levit
