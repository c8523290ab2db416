// What this machine can do at most: chains of fused multiply-adds in registers, and a stream of reads.
// Benchmarks report their share of these figures, measured in the same run.

#include "../ops.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../errors.h"
#include "multiversion.h"

namespace levit {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kChains = 12;  // covers latency x throughput of every FMA unit so far and fits into 16 registers
constexpr int kStreams = 8;  // independent loads in flight per loop of the read stream
constexpr int kMaxThreads = 1024;

template <class T, int kLanes>
using Vector __attribute__((vector_size(kLanes * sizeof(T)))) = T;

// One source for every width: a caller with a target attribute lends it its instruction set by inlining it.
template <int kLanes>
LEVIT_INLINE float fma_chains(int64_t iterations, float scale, float shift) {
  using V = Vector<float, kLanes>;
  V acc[kChains];
  const V x = V{} + scale;
  const V y = V{} + shift;
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) acc[c] = V{} + static_cast<float>(c);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * x + y;
  }
  float sum = 0;
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) sum += acc[c][0];
  return sum;
}

// XOR, because it can neither slow down on a NaN nor be reordered into something else.
template <int kLanes>
LEVIT_INLINE uint64_t xor_words(const char* data, int64_t bytes) {
  using V = Vector<uint64_t, kLanes>;
  V acc[kStreams] = {};
  constexpr int64_t kStep = kStreams * sizeof(V);
  for (int64_t i = 0; i + kStep <= bytes; i += kStep) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      V word;
      std::memcpy(&word, data + i + s * sizeof(V), sizeof(V));
      acc[s] ^= word;
    }
  }
  uint64_t all = 0;
#pragma GCC unroll 8
  for (int s = 0; s < kStreams; ++s) all ^= acc[s][0];
  return all;
}

float fma_plain(int64_t iterations, float x, float y) { return fma_chains<4>(iterations, x, y); }
uint64_t read_plain(const char* data, int64_t bytes) { return xor_words<2>(data, bytes); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float fma_avx2(int64_t n, float x, float y) { return fma_chains<8>(n, x, y); }
__attribute__((target("avx512f"))) float fma_avx512(int64_t n, float x, float y) { return fma_chains<16>(n, x, y); }
__attribute__((target("avx2"))) uint64_t read_avx2(const char* p, int64_t n) { return xor_words<4>(p, n); }
__attribute__((target("avx512f"))) uint64_t read_avx512(const char* p, int64_t n) { return xor_words<8>(p, n); }

__attribute__((target("avx512f,avx512bf16"))) float bf16_dots(int64_t iterations) {
  __m512 acc[kChains];
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80);  // pairs of 1.0
  const __m512bh y = (__m512bh)_mm512_set1_epi32(0x20002000);  // pairs of 2^-63: the sums stay finite
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps(static_cast<float>(c));
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], x, y);
  }
  float sum = 0;
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) sum += acc[c][0];
  return sum;
}
#endif

// Results go here so that no loop can be optimised away; atomic because every thread writes.
std::atomic<float> float_sink;
std::atomic<uint64_t> word_sink;

// Seconds from the first thread's start to the last one's end; all leave one gate together.
template <class Work>
double seconds_of(int threads, const Work& work) {
  std::vector<Clock::time_point> begin(threads), end(threads);
  std::atomic<int> ready{0};
  auto body = [&](int t) {
    ready.fetch_add(1);
    while (ready.load() < threads) std::this_thread::yield();
    begin[t] = Clock::now();
    work(t);
    end[t] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(body, t);
  body(0);
  for (auto& thread : others) thread.join();
  const auto first = *std::min_element(begin.begin(), begin.end());
  const auto last = *std::max_element(end.begin(), end.end());
  return std::chrono::duration<double>(last - first).count();
}

void check_threads(const char* op, int64_t threads) {
  if (threads < 1 || threads > kMaxThreads) {
    fail(op, ": threads must be 1 to ", kMaxThreads, ", got ", threads);
  }
}

void check_iterations(const char* op, int64_t iterations) {
  if (iterations < 1) fail(op, ": iterations must be at least 1, got ", iterations);
}

}  // namespace

double fma_peak(int64_t iterations, int64_t threads) {
  check_iterations("fma_peak", iterations);
  check_threads("fma_peak", threads);
  auto loop = fma_plain;
  int lanes = 4;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    loop = fma_avx512, lanes = 16;
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    loop = fma_avx2, lanes = 8;
  }
#endif
  const double seconds = seconds_of(threads, [&](int) { float_sink = loop(iterations, 0.999999f, 1e-6f); });
  return 2.0 * kChains * lanes * static_cast<double>(iterations) * threads / seconds / 1e9;
}

double bf16_dot_peak(int64_t iterations, int64_t threads) {
  check_iterations("bf16_dot_peak", iterations);
  check_threads("bf16_dot_peak", threads);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) {
    const double seconds = seconds_of(threads, [&](int) { float_sink = bf16_dots(iterations); });
    return 4.0 * kChains * 16 * static_cast<double>(iterations) * threads / seconds / 1e9;
  }
#endif
  return 0.0;
}

double read_stream(const Tensor& buffer, int64_t threads) {
  check_threads("read_stream", threads);
  if (!buffer.is_contiguous()) fail("read_stream: buffer must be contiguous, got shape ", shape(buffer));
  const int64_t step = kStreams * 64;
  const int64_t bytes = buffer.numel() * buffer.element_size();
  const int64_t share = bytes / threads / step * step;
  if (share == 0) {
    fail("read_stream: buffer must hold at least ", step, " bytes per thread, got ", bytes, " for ", threads);
  }
  auto loop = read_plain;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    loop = read_avx512;
  } else if (__builtin_cpu_supports("avx2")) {
    loop = read_avx2;
  }
#endif
  const auto* data = static_cast<const char*>(buffer.data_ptr());
  const double seconds = seconds_of(threads, [&](int t) { word_sink = loop(data + t * share, share); });
  return static_cast<double>(share) * threads / seconds / 1e9;
}

}  // namespace levit
