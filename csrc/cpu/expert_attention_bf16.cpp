// The kernel of expert_attention for bfloat16; see expert_attention.cpp, which calls it.
#include "expert_attention_kernel.h"

namespace levit::attention {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512bf16"))) void run_bf16(const Call<BFloat16>& call, Range images,
                                                                      Range experts, float* out) {
  Kernel<BFloat16, 16, 12>::run(call, images, experts, out);
}
#else
void run_bf16(const Call<BFloat16>&, Range, Range, float*) { __builtin_unreachable(); }
#endif

}  // namespace levit::attention
