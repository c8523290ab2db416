// Kernels with one bug each: the emulator must report it, and where (@ marks the lines); and their right versions,
// which it must not.
#include "../../cuda/gpu.h"
#include "check.h"

namespace {

using namespace levit;

__global__ void neighbour(float* out, int sync) {
  LEVIT_SHARED(memory);
  float* s = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  s[t] = t;  // @fill
  if (sync == 1) __syncthreads();
  if (sync == 2) __syncwarp();
  if (sync == 3) __shfl_xor_sync(~0u, 1, 1);  // a rendezvous, but it orders no memory
  out[t] = s[t ^ 1];  // @neighbour
}
__global__ void reuse(float* out, int sync) {
  LEVIT_SHARED(memory);
  float* s = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x, other = (t + 32) % blockDim.x;
  s[t] = 1;
  __syncthreads();
  out[t] = s[other];  // @before
  if (sync) __syncthreads();
  s[t] = 2;  // @reuse
}
__global__ void other_warp(float* out) {
  LEVIT_SHARED(memory);
  float* s = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  s[t] = t;
  __syncwarp();
  out[t] = s[t ^ 32];  // @warps
}
__global__ void copies(const float* in, float* out, int mistake) {
  LEVIT_SHARED(memory);
  float* s = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  for (int half = 0; half < 2; ++half) {
    const int at = 4 * t + half * 4 * blockDim.x;
    gpu::copy_async<16>(s + at, in + at + (mistake == 3));  // @copy
    gpu::commit_copies();
  }
  if (mistake == 1) gpu::wait_for_copies<1>();
  if (mistake == 0) gpu::wait_for_copies<0>();
  if (mistake == 2) return;
  out[t] = s[4 * t + 4 * blockDim.x];  // @early
  if (mistake == 1) gpu::wait_for_copies<0>();
}
__global__ void out_of_bounds(float* out, int in_shared) {
  LEVIT_SHARED(memory);
  float* s = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  if (in_shared) s[t + 1] = 1;
  out[t + 1] = 1;  // @beyond
}
__global__ void uninitialised(float* out) {
  LEVIT_SHARED(memory);
  out[threadIdx.x] = reinterpret_cast<float*>(memory)[threadIdx.x];  // @unwritten
}
__global__ void divergent_barrier() {
  if (threadIdx.x < 32) {
    __syncthreads();  // @one
  } else {
    __syncthreads();  // @other
  }
}
__global__ void missing_lane() {
  if (threadIdx.x != 5) __syncwarp();  // @warp
  if (threadIdx.x == 5) __syncthreads();  // @block
}
__global__ void exited_lane(float* out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);  // @exited
}
__global__ void other_masks(float* out) {
  out[threadIdx.x] = __shfl_xor_sync(threadIdx.x % 2 ? 0x55555555u << 1 : ~0u, 1.0f, 2);  // @masks
}
__global__ void blocks_meet(float* out, int atomic) {
  if (threadIdx.x) return;
  if (atomic) {
    atomicAdd(out, 1.0f);
  } else {
    *out = 1;  // @twice
  }
}

}  // namespace

int main() {
  float* const out = static_cast<float*>(levit_emu_allocate(64 * sizeof(float)));
  float* const in = static_cast<float*>(levit_emu_allocate(1024 * sizeof(float)));
  const float values[1024] = {};
  levit_emu_upload(in, values, sizeof values);
  const auto shared = 64 * sizeof(float);
  for (int seed = 1; seed <= 5; ++seed) {
    levit_emu_schedule(seed, seed > 1);
    const auto run = [&](auto kernel, int threads, auto... arguments) {
      return LEVIT_LAUNCH(kernel, dim3(1), dim3(threads), shared, nullptr, arguments...);
    };
    const auto reported = [](int status, const char* name, std::initializer_list<const char*> words) {
      expect_report(__FILE__, status, name, words);
    };
    const auto fine = [&](int status, const char* name) {
      expect(!status, std::string(name) + ": " + levit_emu_failure());
    };
    fine(run(neighbour, 64, out, 1), "neighbour");
    fine(run(neighbour, 64, out, 2), "neighbour");
    reported(run(neighbour, 64, out, 0), "no __syncwarp", {"@neighbour", "shared byte"});
    reported(run(neighbour, 64, out, 3), "a shuffle is no __syncwarp", {"@neighbour"});
    fine(run(reuse, 64, out, 1), "reuse");
    reported(run(reuse, 64, out, 0), "no trailing __syncthreads", {"race: ", "@reuse", "@before"});
    reported(run(other_warp, 64, out), "__syncwarp between warps", {"@warps"});
    const auto copy = [&](int mistake) {
      return LEVIT_LAUNCH(copies, dim3(1), dim3(64), 8 * shared, nullptr, in, out, mistake);
    };
    fine(copy(0), "copies");
    reported(copy(1), "too weak a wait", {"cp.async still in flight: read", "@early", "@copy"});
    reported(copy(2), "no wait", {"exits with a cp.async under way", "@copy"});
    reported(copy(3), "misaligned", {"misaligned cp.async", "@copy"});
    reported(run(out_of_bounds, 64, out, 1), "beyond shared memory", {"out of bounds: write of shared byte 256"});
    reported(run(out_of_bounds, 64, out, 0), "beyond a tensor", {"out of bounds: write of global", "@beyond"});
    reported(run(uninitialised, 64, out), "uninitialised", {"uninitialised: read of shared", "@unwritten"});
    reported(run(divergent_barrier, 64), "divergent barrier", {"different barriers", "@one", "@other"});
    reported(run(missing_lane, 32), "a missing lane", {"deadlock", "@warp", "@block"});
    reported(run(exited_lane, 32, out), "an exited lane", {"@exited"});
    reported(run(other_masks, 32, out), "other masks", {"@masks"});
    const auto both = [&](int atomic) {
      return LEVIT_LAUNCH(blocks_meet, dim3(2), dim3(32), 0, nullptr, in, atomic);
    };
    fine(both(1), "atomics of two blocks");
    reported(both(0), "writes of two blocks", {"race: write of global byte", "@twice"});
  }
  return failures() != 0;
}
