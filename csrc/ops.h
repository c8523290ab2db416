// The native ops, one prototype each. To add one: declare it here, write cpu/<op>.cpp, register it in module.cpp.
// With bf16 the large products of float32 tensors round their factors to bfloat16 where the CPU has dot products of such;
// sums, results and all else are float32.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace levit {

using torch::stable::Tensor;

// codes [K, M, L], query [M, L], both float32 or both float64, any strides -> distances [K] (equation 6)
Tensor latent_distance(const Tensor& codes, const Tensor& query);

// patches [B, N, P], w_embed [K, P, Q], b_embed [K, Q], w_qkv [K, Q, 3, H, d], b_qkv [K, 3, H, d], gates none or
// [B or 1, K, H or 1], all float32 or all float64, any strides -> [K, B, N, H*d], with gates their gated sum
// [B, N, H*d] (equations 2-4, 8). Weights that are dense, or views of nn.Linear's layout, are read where they are.
Tensor expert_attention(const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed, const Tensor& w_qkv,
                        const Tensor& b_qkv, const std::optional<Tensor>& gates, double negative_slope);

// The same with queries that meet the tokens themselves: w_scores [K, Q, H, Q], b_scores [K, H, Q] in place of queries and
// keys, w_values [K, Q, H, d], b_values [K, H, d]. Written to out, of any strides of experts and images without gates.
void folded_attention(const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed, const Tensor& w_scores,
                      const Tensor& b_scores, const Tensor& w_values, const Tensor& b_values,
                      const std::optional<Tensor>& gates, double negative_slope, const Tensor& out);

// The same for one expert in training, all dense: w_embed [Q, P], b_embed [Q], w_qkv [3, H, d, Q], b_qkv [3, H, d], gates
// none or [B or 1, H or 1] -> out [B, N, H*d], and what the backward pass needs in a layout of its own, of the sizes
// [B, N, Q], [B, N, 3, H, d], [H, B, N, N].
std::vector<Tensor> expert_attention_train(const Tensor& patches, const Tensor& w_embed, const Tensor& b_embed,
                                           const Tensor& w_qkv, const Tensor& b_qkv, const std::optional<Tensor>& gates,
                                           double negative_slope, bool bf16);

// grad [B, N, H*d] and what was kept -> gradients of patches (empty unless asked for), of w_embed, b_embed, w_qkv and
// b_qkv, and of the gate of every image and head [B, H]
std::vector<Tensor> expert_attention_train_backward(const Tensor& grad, const Tensor& patches, const Tensor& w_embed,
                                                    const Tensor& b_embed, const Tensor& w_qkv, const Tensor& b_qkv,
                                                    const std::optional<Tensor>& gates, double negative_slope,
                                                    const std::vector<Tensor>& kept, bool needs_patches, bool bf16);

// images [B, F], encoder w1 b1 w2 b2 w_mu b_mu w_log_sigma b_log_sigma, decoder w1 b1 w2 b2 w3 b3, every w dense
// [K, out, in], every b [K, out], noise [S, L] or none, all float32 or all float64 -> VAE losses [B, K].
Tensor elbo_loss(const Tensor& images, const std::vector<Tensor>& encoder, const std::vector<Tensor>& decoder,
                 double beta, const std::optional<Tensor>& noise);

// images [B, F], encoder as of elbo_loss, noise [K, B, L], all float32 or all float64 -> mu + sigma * noise [K, B, L].
Tensor vae_codes(const Tensor& images, const std::vector<Tensor>& encoder, const Tensor& noise, bool bf16);

// images [B, F], weights of one MLP VAE in nn.Linear's layout, w [out, in] and b [out] of the encoder's w1 w2 w_mu w_log_sigma
// and the decoder's w1 w2 w3, noise [B, L], all float32 or all float64 -> the mean loss of the images, and the gradients
// of the weights in their order
std::vector<Tensor> vae_training(const Tensor& images, const std::vector<Tensor>& weights, double beta,
                                 const Tensor& noise, bool bf16);

// features [B, F], labels int64 [B] (-1: none), weights w [out, in], gain [out], shift [out] per hidden layer, then w, b of
// the last, all float32 or all float64 -> the mean cross-entropy of the labelled images, the gradient of the features,
// those of the weights in their order, and mean and (biased) variance of x w^T per hidden layer
std::vector<Tensor> head_training(const Tensor& features, const Tensor& labels, const std::vector<Tensor>& weights,
                                  double negative_slope, double epsilon, bool bf16);

// patches [B, N, P], labels int64 [B] (-1: none), attention w_embed [Q, P], gain, shift [Q], w_qkv [3 H d, Q], b_qkv [3 H d],
// head as of head_training, gates [K, H or 1] or none, features [M, K - 1, N, H d] or none (K = 1) with index as of
// dkf_fuse, all float32 or all float64 (features also bfloat16) -> the mean cross-entropy of the labelled images, the
// gradients of attention, head and gates, mean and (biased) variance of the patches' embedding and per hidden layer
std::vector<Tensor> expert_training(const Tensor& patches, const Tensor& labels, const std::vector<Tensor>& attention,
                                    const std::vector<Tensor>& head, const std::optional<Tensor>& gates,
                                    const std::optional<Tensor>& features, const std::optional<Tensor>& index,
                                    int64_t heads, double negative_slope, double epsilon, bool bf16);

// Running means, variances and counters of batch norms towards a batch's: statistics are mean, without the bias of the
// layer before, and biased variance of that many rows, layer after layer; all dense, all float32 or all float64
void move_statistics(const std::vector<Tensor>& means, const std::vector<Tensor>& variances,
                     const std::vector<Tensor>& counters, const std::vector<Tensor>& biases,
                     const std::vector<Tensor>& statistics, const std::vector<int64_t>& rows, double momentum);

// positions int64 [M], experts int64 [K] -> standard normal float64 [K, M, latent], each a function of its place
Tensor position_noise(const Tensor& positions, const Tensor& experts, int64_t latent, int64_t seed);

// Convolution of stride 2 and padding 1, fine [B, H, W, F] -> coarse [B, height, width, C], its transposed one, coarse ->
// fine, and their weight's gradient [C, F, kernel, kernel]; weight [C, F, k, k] both ways, bias none or [channels of the
// result], all dense, all float32 or all float64
Tensor conv_to_coarse(const Tensor& fine, const Tensor& weight, const std::optional<Tensor>& bias, int64_t height,
                      int64_t width);
Tensor conv_to_fine(const Tensor& coarse, const Tensor& weight, const std::optional<Tensor>& bias, int64_t height,
                    int64_t width);
Tensor conv_weight_gradient(const Tensor& coarse, const Tensor& fine, int64_t kernel);

// features [M, K, N, E] float32, bfloat16 or float64 whose [N, E] are dense, gates [B or 1, K, H or 1] in the type of the
// sums, index int64 [B] or none (B = M) -> [B, N, E] (equation 8)
Tensor dkf_fuse(const Tensor& features, const Tensor& gates, const std::optional<Tensor>& index);

// The same added to out [B, N, E], dense and in the type of the gates
void add_dkf_fuse(const Tensor& features, const Tensor& gates, const std::optional<Tensor>& index, const Tensor& out);

// grad [B, N, E] -> the gates' gradient per image and head [B, K, heads]
Tensor dkf_fuse_gate_gradient(const Tensor& grad, const Tensor& features, const std::optional<Tensor>& index,
                              int64_t heads);

// tokens [T, D], patches [B, N, D], weights [D, D] in nn.Linear's layout, bo [D], at any strides; all float32 or all
// float64. Writes to out, dense [B, T, D], what every token draws from itself and from the patches of every image,
// through the output projection.
void task_attention(const Tensor& tokens, const Tensor& patches, const Tensor& wq, const Tensor& wk, const Tensor& wv,
                    const Tensor& wo, const Tensor& bo, int64_t heads, double scale, const Tensor& out);

// Asks for huge pages under buffer (contiguous); whether the system agreed.
bool huge_pages(const Tensor& buffer);

// Ceilings of this machine: GFLOP/s of an fp32 FMA loop and of bfloat16 dot products (0 where the CPU has none), and
// GB/s of one pass over the bytes of buffer (contiguous), each with that many threads of its own.
double fma_peak(int64_t iterations, int64_t threads);
double bf16_dot_peak(int64_t iterations, int64_t threads);
double read_stream(const Tensor& buffer, int64_t threads);

}  // namespace levit
