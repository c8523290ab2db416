// The kernel of one expert in training with factors rounded to bfloat16; expert_attention_training.cpp calls it.
#include "expert_attention_training_kernel.h"

namespace levit::attention {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512bf16"))) void run_bf16(const Training<float>& step, Phase phase,
                                                                      Range range) {
  TrainingKernel<float, 16, 12, BFloat16>::run(step, phase, range);
}
#else
void run_bf16(const Training<float>&, Phase, Range) { __builtin_unreachable(); }
#endif

}  // namespace levit::attention
