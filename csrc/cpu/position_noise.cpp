// The noise of frozen codes (equation 6): a hash of (seed, expert, position, component), made normal. Every number is a
// function of its place alone, so threads may take any rows.
#include "../ops.h"

#include <cmath>
#include <cstdint>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

constexpr uint64_t kBySeed = 0xA0761D6478BD642F, kByComponent = 0xD1B54A32D192ED03, kByAngle = 0x8CB92BA72F3D8DD7;
constexpr double kTurn = 6.283185307179586476925;
constexpr int64_t kTaskNumbers = 1 << 12;  // fewer are not worth a thread

// A step of splitmix64, without its top bit: torch's integers have a sign there
uint64_t hash(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return (x ^ (x >> 31)) & (~uint64_t{0} >> 1);
}

// 53 bits of a hash as a number between 0 and 1, never 0: its logarithm is taken
double fraction(uint64_t hash) { return (static_cast<double>(hash >> 10) + 0.5) * 0x1p-53; }

}  // namespace

Tensor position_noise(const Tensor& positions, const Tensor& experts, int64_t latent, int64_t seed) {
  for (const Tensor* numbers : {&positions, &experts}) {
    if (numbers->scalar_type() != ScalarType::Long || numbers->dim() != 1) {
      fail("position_noise: positions and experts must be int64 with one dimension, got ",
           torch::headeronly::toString(numbers->scalar_type()), " ", shape(*numbers));
    }
  }
  if (latent < 1) fail("position_noise: latent must be at least 1, got ", latent);
  const Tensor dense_positions = torch::stable::contiguous(positions), dense_experts = torch::stable::contiguous(experts);
  const int64_t count = positions.numel();
  const int64_t *position = dense_positions.const_data_ptr<int64_t>(), *expert = dense_experts.const_data_ptr<int64_t>();
  const Tensor noise = torch::stable::new_empty(positions, {experts.numel(), count, latent}, ScalarType::Double);
  double* numbers = noise.mutable_data_ptr<double>();
  const uint64_t by_seed = static_cast<uint64_t>(seed) * kBySeed;
  const int64_t rows_per_task = 1 + kTaskNumbers / latent;
  torch::stable::parallel_for(0, experts.numel() * count, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint64_t key = hash(hash(expert[row / count] + by_seed) + position[row % count]);
      for (int64_t i = row * latent; i < (row + 1) * latent; ++i, key += kByComponent) {
        const double radius = fraction(hash(key)), angle = fraction(hash(key + kByAngle));
        numbers[i] = std::sqrt(-2 * std::log(radius)) * std::cos(kTurn * angle);
      }
    }
  });
  return noise;
}

}  // namespace levit
