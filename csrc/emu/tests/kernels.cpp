// The kernels as CMake alone can test them: small sizes against plain loops in double. pytest runs them at all sizes,
// in all precisions and against the package's own references (tests/levit_kernels/emulated).
#include <cmath>
#include <random>
#include <vector>

#include "../../cuda/dkf_fuse.h"
#include "../../cuda/expert_attention.h"
#include "../numbers.h"
#include "check.h"

namespace {

using levit::gpu::bf16;
using Numbers = std::vector<double>;

constexpr int kExperts = 3, kBatch = 5, kTokens = 16, kPixels = 20, kWidth = 24, kHeads = 2, kDepth = 12;
constexpr int kFeatures = kHeads * kDepth;

std::mt19937 generator(0);

// Normal numbers that both float and bf16 hold exactly
Numbers draw(size_t count, double scale) {
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  Numbers numbers(count);
  for (double& x : numbers) x = levit::gpu::to_float(levit::gpu::from_float<bf16>(normal(generator)));
  return numbers;
}

template <class T>
T* upload(const Numbers& numbers) {
  std::vector<T> values;
  for (const double x : numbers) values.push_back(levit::gpu::from_float<T>(static_cast<float>(x)));
  void* const to = levit_emu_allocate(values.size() * sizeof(T));
  levit_emu_upload(to, values.data(), values.size() * sizeof(T));
  return static_cast<T*>(to);
}

struct Weights {
  Numbers patches = draw(kBatch * kTokens * kPixels, 1), w_embed = draw(kExperts * kPixels * kWidth, 0.2);
  Numbers b_embed = draw(kExperts * kWidth, 0.2), w_qkv = draw(kExperts * kWidth * 3 * kFeatures, 0.2);
  Numbers b_qkv = draw(kExperts * 3 * kFeatures, 0.2), gates = draw(kExperts, 1);
};

// Equations 2-4 and 8 of SPEC.md for one image, added to out [N, H d]
void add_expert(const Weights& of, int expert, int image, double* out) {
  std::vector<Numbers> tokens(kTokens, Numbers(kWidth)), qkv(kTokens, Numbers(3 * kFeatures));
  for (int n = 0; n < kTokens; ++n) {
    for (int q = 0; q < kWidth; ++q) {
      double sum = of.b_embed[expert * kWidth + q];
      for (int p = 0; p < kPixels; ++p) {
        sum += of.patches[(image * kTokens + n) * kPixels + p] * of.w_embed[(expert * kPixels + p) * kWidth + q];
      }
      tokens[n][q] = sum > 0 ? sum : 0.2 * sum;
    }
    for (int c = 0; c < 3 * kFeatures; ++c) {
      qkv[n][c] = of.b_qkv[expert * 3 * kFeatures + c];
      for (int q = 0; q < kWidth; ++q) qkv[n][c] += tokens[n][q] * of.w_qkv[(expert * kWidth + q) * 3 * kFeatures + c];
    }
  }
  for (int head = 0; head < kHeads; ++head) {
    for (int query = 0; query < kTokens; ++query) {
      Numbers power(kTokens);
      double total = 0;
      for (int key = 0; key < kTokens; ++key) {
        double score = 0;
        for (int c = 0; c < kDepth; ++c) {
          score += qkv[query][head * kDepth + c] * qkv[key][kFeatures + head * kDepth + c];
        }
        total += power[key] = std::exp(score / std::sqrt(kDepth));
      }
      for (int key = 0; key < kTokens; ++key) {
        for (int c = 0; c < kDepth; ++c) {
          const double value = qkv[key][2 * kFeatures + head * kDepth + c];
          out[query * kFeatures + head * kDepth + c] += of.gates[expert] * power[key] / total * value;
        }
      }
    }
  }
}

double worst(const float* got, const Numbers& expected) {
  double error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double apart = std::fabs(got[i] - expected[i]);
    error = apart <= error ? error : apart;  // NaN is worst
  }
  return error;
}

template <class T>
void check_attention(LevitType type, int fits, double bound, const char* name) {
  levit_emu_release_all();
  const Weights weights;
  Numbers expected(kBatch * kTokens * kFeatures);
  for (int image = 0; image < kBatch; ++image) {
    for (int k = 0; k < kExperts; ++k) add_expert(weights, k, image, expected.data() + image * kTokens * kFeatures);
  }
  LevitExpertAttention call{};
  call.patches = upload<T>(weights.patches);
  call.w_embed = upload<T>(weights.w_embed);
  call.b_embed = upload<T>(weights.b_embed);
  call.w_qkv = upload<T>(weights.w_qkv);
  call.b_qkv = upload<T>(weights.b_qkv);
  call.gates = {upload<float>(weights.gates), 0, 1, 0};
  float* const out = static_cast<float*>(levit_emu_allocate(expected.size() * sizeof(float)));
  call.out = out;
  call.batch = kBatch;
  call.experts = kExperts, call.tokens = kTokens, call.pixels = kPixels;
  call.width = kWidth, call.heads = kHeads, call.depth = kDepth;
  call.slope = 0.2f;
  call.type = type, call.out_type = kLevitFloat;
  call.processors = 1, call.shared_bytes = 163 << 10;
  expect(levit_expert_attention_fits(&call) == fits, std::string(name) + ": another kernel than expected");
  expect(!levit_expert_attention(&call, nullptr), std::string(name) + ": " + levit_emu_failure());
  const double error = worst(out, expected);
  expect(error <= bound, std::string(name) + ": error " + std::to_string(error));
}

void check_fuse() {
  levit_emu_release_all();
  constexpr int kRows = 4;
  const Numbers features = draw(kRows * kExperts * kTokens * kFeatures, 1), gates = draw(kExperts, 1);
  const std::vector<int64_t> index = {2, 0, 2, 3, 1};
  Numbers expected(index.size() * kTokens * kFeatures);
  constexpr int kNumbers = kTokens * kFeatures;
  for (size_t b = 0; b < index.size(); ++b) {
    for (int k = 0; k < kExperts; ++k) {
      const double* stored = features.data() + (index[b] * kExperts + k) * kNumbers;
      for (int i = 0; i < kNumbers; ++i) expected[b * kNumbers + i] += gates[k] * stored[i];
    }
  }
  LevitDkfFuse call{};
  call.features = upload<bf16>(features);
  call.per_row = kExperts * kNumbers, call.per_expert = kNumbers;
  call.gates = {upload<float>(gates), 0, 1, 0};
  int64_t* const rows = static_cast<int64_t*>(levit_emu_allocate(index.size() * sizeof(int64_t)));
  levit_emu_upload(rows, index.data(), index.size() * sizeof(int64_t));
  call.index = rows;
  call.rows = kRows, call.batch = static_cast<int64_t>(index.size());
  call.experts = kExperts, call.tokens = kTokens, call.width = kFeatures, call.heads = 1;
  call.type = kLevitBFloat16, call.out_type = kLevitFloat;
  float* const out = static_cast<float*>(levit_emu_allocate(expected.size() * sizeof(float)));
  call.out = out;
  expect(!levit_dkf_fuse(&call, nullptr), std::string("dkf_fuse: ") + levit_emu_failure());
  expect(worst(out, expected) <= 1e-5, "dkf_fuse");
}

}  // namespace

int main() {
  for (int seed = 0; seed < 5; ++seed) {
    levit_emu_schedule(seed, seed > 0);
    check_attention<float>(kLevitFloat, 1, 1e-5, "expert_attention");
    check_attention<bf16>(kLevitBFloat16, 2, 0.05, "expert_attention on tensor cores");
    check_fuse();
  }
  return failures() != 0;
}
