// Schemas and registration of the native ops (prototypes: ops.h). levit_kernels/native.py loads this library with
// torch.ops.load_library; as it is no Python module it needs no Python headers to build, and torch's stable ABI lets one
// binary serve every torch from TORCH_TARGET_VERSION on.
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(levit_native, m) {
  m.def("latent_distance(Tensor codes, Tensor query) -> Tensor");
  m.def(
      "expert_attention(Tensor patches, Tensor w_embed, Tensor b_embed, Tensor w_qkv, Tensor b_qkv, Tensor? gates, "
      "float negative_slope) -> Tensor");
  m.def(
      "folded_attention(Tensor patches, Tensor w_embed, Tensor b_embed, Tensor w_scores, Tensor b_scores, "
      "Tensor w_values, Tensor b_values, Tensor? gates, float negative_slope, Tensor(a!) out) -> ()");
  m.def(
      "expert_attention_train(Tensor patches, Tensor w_embed, Tensor b_embed, Tensor w_qkv, Tensor b_qkv, "
      "Tensor? gates, float negative_slope, bool bf16) -> Tensor[]");
  m.def(
      "expert_attention_train_backward(Tensor grad, Tensor patches, Tensor w_embed, Tensor b_embed, Tensor w_qkv, "
      "Tensor b_qkv, Tensor? gates, float negative_slope, Tensor[] kept, bool needs_patches, bool bf16) -> Tensor[]");
  m.def("elbo_loss(Tensor images, Tensor[] encoder, Tensor[] decoder, float beta, Tensor? noise) -> Tensor");
  m.def("vae_codes(Tensor images, Tensor[] encoder, Tensor noise, bool bf16) -> Tensor");
  m.def("vae_training(Tensor images, Tensor[] weights, float beta, Tensor noise, bool bf16) -> Tensor[]");
  m.def(
      "head_training(Tensor features, Tensor labels, Tensor[] weights, float negative_slope, float epsilon, bool bf16) "
      "-> Tensor[]");
  m.def(
      "expert_training(Tensor patches, Tensor labels, Tensor[] attention, Tensor[] head, Tensor? gates, Tensor? features, "
      "Tensor? index, int heads, float negative_slope, float epsilon, bool bf16) -> Tensor[]");
  m.def(
      "move_statistics(Tensor(a!)[] means, Tensor(b!)[] variances, Tensor(c!)[] counters, Tensor[] biases, "
      "Tensor[] statistics, int[] rows, float momentum) -> ()");
  m.def("position_noise(Tensor positions, Tensor experts, int latent, int seed) -> Tensor");
  m.def("conv_to_coarse(Tensor fine, Tensor weight, Tensor? bias, int height, int width) -> Tensor");
  m.def("conv_to_fine(Tensor coarse, Tensor weight, Tensor? bias, int height, int width) -> Tensor");
  m.def("conv_weight_gradient(Tensor coarse, Tensor fine, int kernel) -> Tensor");
  m.def("dkf_fuse(Tensor features, Tensor gates, Tensor? index) -> Tensor");
  m.def("dkf_fuse_gate_gradient(Tensor grad, Tensor features, Tensor? index, int heads) -> Tensor");
  m.def(
      "task_attention(Tensor tokens, Tensor patches, Tensor wq, Tensor wk, Tensor wv, Tensor wo, Tensor bo, int heads, "
      "float scale, Tensor(a!) out) -> ()");
  m.def("fma_peak(int iterations, int threads) -> float");
  m.def("bf16_dot_peak(int iterations, int threads) -> float");
  m.def("huge_pages(Tensor buffer) -> bool");
  m.def("read_stream(Tensor buffer, int threads) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(levit_native, CPU, m) {
  m.impl("latent_distance", TORCH_BOX(&levit::latent_distance));
  m.impl("expert_attention", TORCH_BOX(&levit::expert_attention));
  m.impl("folded_attention", TORCH_BOX(&levit::folded_attention));
  m.impl("expert_attention_train", TORCH_BOX(&levit::expert_attention_train));
  m.impl("expert_attention_train_backward", TORCH_BOX(&levit::expert_attention_train_backward));
  m.impl("elbo_loss", TORCH_BOX(&levit::elbo_loss));
  m.impl("vae_codes", TORCH_BOX(&levit::vae_codes));
  m.impl("vae_training", TORCH_BOX(&levit::vae_training));
  m.impl("head_training", TORCH_BOX(&levit::head_training));
  m.impl("expert_training", TORCH_BOX(&levit::expert_training));
  m.impl("move_statistics", TORCH_BOX(&levit::move_statistics));
  m.impl("position_noise", TORCH_BOX(&levit::position_noise));
  m.impl("conv_to_coarse", TORCH_BOX(&levit::conv_to_coarse));
  m.impl("conv_to_fine", TORCH_BOX(&levit::conv_to_fine));
  m.impl("conv_weight_gradient", TORCH_BOX(&levit::conv_weight_gradient));
  m.impl("dkf_fuse", TORCH_BOX(&levit::dkf_fuse));
  m.impl("dkf_fuse_gate_gradient", TORCH_BOX(&levit::dkf_fuse_gate_gradient));
  m.impl("task_attention", TORCH_BOX(&levit::task_attention));
  m.impl("huge_pages", TORCH_BOX(&levit::huge_pages));
  m.impl("read_stream", TORCH_BOX(&levit::read_stream));
}

// Without a tensor among the arguments there is no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(levit_native, CompositeExplicitAutograd, m) {
  m.impl("fma_peak", TORCH_BOX(&levit::fma_peak));
  m.impl("bf16_dot_peak", TORCH_BOX(&levit::bf16_dot_peak));
}
