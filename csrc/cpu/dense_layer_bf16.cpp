// The dense layer of weights in bfloat16.
#include "dense_columns.h"
#include "scratch.h"

namespace levit {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512bf16"))) void dense(const Layer<BFloat16>& layer, int64_t k,
                                                                   const float* x, const Layout<float>& layout,
                                                                   Activation activation, float* y) {
  using Number = Words<BFloat16, 16>;
  static thread_local Scratch scratch;
  const int64_t columns = layout.rows;
  auto* words = static_cast<uint32_t*>(scratch.get((layer.in + 1) / 2 * columns * sizeof(uint32_t)));
  for (int64_t i = 0; i < layer.in; i += 2) {
    for (int64_t column = 0; column < columns; column += 16) {
      const float* from = x + i * columns + column;
      const Number::V pair[2] = {load<16>(from), i + 1 < layer.in ? load<16>(from + columns) : Number::V{}};
      store(words + i / 2 * columns + column, Number::join(pair));
    }
  }
  dense_columns(layer, k, words, columns, y);
  activate(y, columns * layer.out, activation);
}
#else
void dense(const Layer<BFloat16>&, int64_t, const float*, const Layout<float>&, Activation, float*) {
  __builtin_unreachable();
}
#endif

}  // namespace levit
