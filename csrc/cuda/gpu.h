// The only header that kernels include. nvcc: thin wrappers of sm_80's instructions. Any other compiler: the emulator
// in csrc/emu, which runs the same kernels on the CPU and checks every access.
#pragma once

#ifdef __CUDACC__

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// unsigned char* name: the block's shared memory, as large as the launch says
#define LEVIT_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

// A cudaError_t as an int: 0 if the kernel was started.
#define LEVIT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::levit::gpu::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

namespace levit::gpu {

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  return __float2half_rn(x);
}

// Two numbers in the register of a matrix operand, the first in the lower half
template <class T>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  const T pair[2] = {from_float<T>(first), from_float<T>(second)};
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// cp.async of 4, 8 or 16 bytes; zeros if there is nothing to copy
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid = true) {
  const int copied = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {  // past L1: nobody else of this SM reads it
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(copied)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                 "r"(copied)
                 : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroupsLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

// Rows of 8 x 8 matrices of 16-bit numbers; lanes 8 m .. 8 m + 7 name those of matrix m.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_rows(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}

// c [16, 8] += a [16, 16] b [16, 8]
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A device-side assertion: what fails it ends the kernel.
__device__ __forceinline__ void require(bool holds) {
  if (!holds) __trap();
}

// An error that is told is forgotten: else the next launch would be blamed for it.
inline int status_of(cudaError_t result) { return result == cudaSuccess ? result : cudaGetLastError(); }

inline int use_device(int device) { return status_of(cudaSetDevice(device)); }

constexpr int kRuntimeVersion = CUDART_VERSION;
inline int driver_version() {
  int version = 0;
  return status_of(cudaDriverGetVersion(&version)) ? 0 : version;
}

inline const char* error_text(int status) {
  if (status == cudaErrorNoKernelImageForDevice) {
    return "the CUDA kernels were not compiled for this GPU; reinstall levit-kernels with its architecture in "
           "TORCH_CUDA_ARCH_LIST";
  }
  if (status == cudaErrorInsufficientDriver) return "the NVIDIA driver is older than the CUDA runtime of the kernels";
  if (status == cudaErrorUnsupportedPtxVersion) {
    return "the NVIDIA driver is too old to translate the PTX of the CUDA kernels; update it, or reinstall levit-kernels "
           "with this GPU's architecture in TORCH_CUDA_ARCH_LIST";
  }
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

template <class Kernel, class... Arguments>
int launch(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, void* stream, const Arguments&... arguments) {
  if (shared_bytes > 48 << 10) {  // more must be asked for
    const int refused =
        status_of(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
    if (refused) return refused;
  }
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace levit::gpu

#else

#include "../emu/async_copy.h"
#include "../emu/cuda.h"
#include "../emu/matrix.h"

#define LEVIT_SHARED(name) unsigned char* const name = ::levit::emu::shared_memory()
#ifndef LEVIT_LAUNCH  // emu/launches.h has its own
#define LEVIT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream), ::levit::emu::launch(grid, block, shared_bytes, [=] { (kernel)(__VA_ARGS__); }))
#endif

namespace levit::gpu {

template <class T>
uint32_t pack(float first, float second) {
  return from_float<T>(first).bits | static_cast<uint32_t>(from_float<T>(second).bits) << 16;
}
inline int use_device(int) { return 0; }
constexpr int kRuntimeVersion = 0;
inline int driver_version() { return 0; }
inline const char* error_text(int) { return emu::failure(); }
inline void require(bool holds, LEVIT_CALLER) { emu::require(holds, {file, line}); }
template <int kBytes>
void copy_async(void* to, const void* from, bool valid = true, LEVIT_CALLER) {
  emu::copy_async(to, from, kBytes, valid ? kBytes : 0, {file, line});
}
inline void commit_copies() { emu::commit_copies(); }
template <int kGroupsLeft>
void wait_for_copies(LEVIT_CALLER) {
  emu::wait_for_copies(kGroupsLeft, {file, line});
}
template <int kMatrices>
void load_transposed(uint32_t (&r)[kMatrices], const void* row, LEVIT_CALLER) {
  emu::load_matrices(r, kMatrices, true, row, {file, line});
}
template <int kMatrices>
void load_rows(uint32_t (&r)[kMatrices], const void* row, LEVIT_CALLER) {
  emu::load_matrices(r, kMatrices, false, row, {file, line});
}
inline uint32_t transpose(uint32_t matrix, LEVIT_CALLER) { return emu::transpose_matrix(matrix, {file, line}); }
template <class T>
void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, LEVIT_CALLER) {
  const uint32_t b[2] = {b0, b1};
  emu::multiply_matrices<T>(c, a, b, {file, line});
}

}  // namespace levit::gpu

#endif
