// Where the lanes keep the elements of matrices: against the formulas of the PTX ISA ("Matrix fragments for
// mma.m16n8k16 with floating point type", "ldmatrix", "movmatrix"), written down here as the PTX ISA has them.
#include <vector>

#include "../../cuda/gpu.h"
#include "check.h"

namespace {

using namespace levit;

// PTX ISA, of element i: A, row = groupID (+ 8 if i is 2, 3, 6, 7), column = threadID_in_group * 2 + (i & 1) (+ 8 from
// i = 4 on); B, row = threadID_in_group * 2 + (i & 1) (+ 8 from i = 2 on), column = groupID; C, row = groupID (+ 8 from
// i = 2 on), column = threadID_in_group * 2 + (i & 1).
template <class T>
__global__ void product(const T* a, const T* b, float* c) {
  const int group = threadIdx.x >> 2, in_group = threadIdx.x % 4;
  T of_a[8], of_b[4];
  float of_c[4];
  for (int i = 0; i < 8; ++i) {
    const int row = (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group : group + 8;
    of_a[i] = a[row * 16 + in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0)];
  }
  for (int i = 0; i < 4; ++i) of_b[i] = b[(in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)) * 8 + group];
  float* const at = c + group * 8 + in_group * 2;
  for (int i = 0; i < 4; ++i) of_c[i] = at[(i < 2 ? 0 : 8) * 8 + (i & 1)];
  uint32_t packed_a[4], packed_b[2];
  std::memcpy(packed_a, of_a, sizeof packed_a);
  std::memcpy(packed_b, of_b, sizeof packed_b);
  gpu::multiply<T>(of_c, packed_a, packed_b[0], packed_b[1]);
  for (int i = 0; i < 4; ++i) at[(i < 2 ? 0 : 8) * 8 + (i & 1)] = of_c[i];
}

template <class T>
void check_product(const char* name) {
  std::vector<T> a(256), b(128);
  std::vector<float> c(128), expected(128);
  for (int i = 0; i < 256; ++i) a[i] = gpu::from_float<T>(i * 7 % 17 - 8);
  for (int i = 0; i < 128; ++i) b[i] = gpu::from_float<T>(i * 5 % 13 - 6);
  for (int i = 0; i < 128; ++i) c[i] = i % 9;
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float& sum = expected[m * 8 + n] = c[m * 8 + n];
      for (int k = 0; k < 16; ++k) sum += ((m * 16 + k) * 7 % 17 - 8) * ((k * 8 + n) * 5 % 13 - 6);
    }
  }
  const T *in_a = a.data(), *in_b = b.data();
  float* out = c.data();
  expect(!LEVIT_LAUNCH(product<T>, dim3(1), dim3(32), 0, nullptr, in_a, in_b, out), levit_emu_failure());
  expect(c == expected, std::string("mma of ") + name);
}

// PTX ISA: lane l receives of each 8 x 8 matrix the elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4; with .trans, of the
// matrix transposed.
__global__ void loads(const uint16_t* rows, int* wrong) {
  LEVIT_SHARED(memory);
  uint16_t* s = reinterpret_cast<uint16_t*>(memory);
  const int lane = threadIdx.x;
  for (int i = lane; i < 32 * 8; i += 32) s[i] = rows[i];
  __syncwarp();
  uint32_t plain[4], turned[4], two[2];
  gpu::load_rows(plain, s + lane * 8);
  gpu::load_transposed(turned, s + lane * 8);
  gpu::load_transposed(two, s + lane % 16 * 8);
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4, column = lane % 4 * 2 + half;
      const auto element = [&](uint32_t word) { return static_cast<uint16_t>(word >> 16 * half); };
      const uint16_t across = rows[(matrix * 8 + row) * 8 + column], down = rows[(matrix * 8 + column) * 8 + row];
      if (element(plain[matrix]) != across || element(turned[matrix]) != down) atomicAdd(wrong, 1);
      if (matrix < 2 && element(two[matrix]) != down) atomicAdd(wrong, 1);
      if (element(gpu::transpose(plain[matrix])) != down) atomicAdd(wrong, 1);
    }
  }
}

__global__ void exchanges(int* wrong) {
  const int lane = threadIdx.x;
  if (__shfl_xor_sync(~0u, lane, 5) != (lane ^ 5)) atomicAdd(wrong, 1);
  if (__shfl_down_sync(~0u, lane, 3) != (lane + 3 < 32 ? lane + 3 : lane)) atomicAdd(wrong, 1);
  if (__shfl_sync(~0u, 2.5 * lane, 7) != 17.5) atomicAdd(wrong, 1);
  if (__ballot_sync(~0u, lane % 3 == 0) != 0x49249249u) atomicAdd(wrong, 1);
}

void check_numbers() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const gpu::f16 half{static_cast<uint16_t>(bits)};
    const gpu::bf16 brain{static_cast<uint16_t>(bits)};
    const bool nan = (bits & 0x7FFF) > 0x7C00, brain_nan = (bits & 0x7FFF) > 0x7F80;
    expect(nan || gpu::from_float<gpu::f16>(gpu::to_float(half)).bits == bits, "half " + std::to_string(bits));
    expect(brain_nan || gpu::from_float<gpu::bf16>(gpu::to_float(brain)).bits == bits, "bf16 " + std::to_string(bits));
  }
  // ties go to even, what lies beyond the largest half to infinity, the smallest subnormal is 2^-24
  expect(gpu::from_float<gpu::f16>(2049.0f).bits == 0x6800, "half of 2049");
  expect(gpu::from_float<gpu::f16>(2051.0f).bits == 0x6802, "half of 2051");
  expect(gpu::from_float<gpu::f16>(65519.0f).bits == 0x7BFF, "half of 65519");
  expect(gpu::from_float<gpu::f16>(-65520.0f).bits == 0xFC00, "half of -65520");
  expect(gpu::from_float<gpu::f16>(0x1.8p-25f).bits == 1, "half of 1.5 * 2^-25");
  expect(gpu::from_float<gpu::bf16>(257.0f).bits == 0x4380, "bf16 of 257");
  expect(gpu::from_float<gpu::bf16>(259.0f).bits == 0x4382, "bf16 of 259");
}

}  // namespace

int main() {
  check_product<gpu::bf16>("bf16");
  check_product<gpu::f16>("half");
  std::vector<uint16_t> rows(256);
  for (int i = 0; i < 256; ++i) rows[i] = i * 251;
  int wrong = 0, *count = &wrong;
  const uint16_t* in = rows.data();
  expect(!LEVIT_LAUNCH(loads, dim3(1), dim3(32), 512, nullptr, in, count), levit_emu_failure());
  expect(!wrong, "ldmatrix, movmatrix: " + std::to_string(wrong) + " elements");
  expect(!LEVIT_LAUNCH(exchanges, dim3(1), dim3(32), 0, nullptr, count), levit_emu_failure());
  expect(!wrong, "shuffles and votes: " + std::to_string(wrong) + " lanes");
  check_numbers();
  return failures() != 0;
}
