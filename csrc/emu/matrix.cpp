#include "matrix.h"

#include <cstring>

#include "machine.h"
#include "numbers.h"

namespace levit::emu {

namespace {

struct Rows {
  uint16_t elements[8];
  uint32_t* registers;
};

}  // namespace

void load_matrices(uint32_t* registers, int matrices, bool transposed, const void* row, const Site& site) {
  Machine& m = machine();
  Rows mine{{}, registers};
  if (m.thread() % 32 < 8 * matrices) {
    if (reinterpret_cast<uintptr_t>(row) % 16) m.fail("misaligned row of ldmatrix", site);
    if (!m.memory.holds(row)) m.fail("ldmatrix from what is not shared memory", site);
    m.memory.access(Kind::kRead, row, 16, m.thread(), place_of(site));
    std::memcpy(mine.elements, row, 16);
  }
  m.meet(~0u, &mine, site, [=](Machine::Lanes& lanes, uint32_t) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < matrices; ++matrix) {
        const auto at = [&](int r, int c) -> uint32_t {
          return static_cast<Rows*>(lanes[matrix * 8 + r])->elements[c];
        };
        const int i = lane / 4, j = lane % 4 * 2;
        static_cast<Rows*>(lanes[lane])->registers[matrix] =
            transposed ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
      }
    }
  });
}

uint32_t transpose_matrix(uint32_t elements, const Site& site) {
  struct Argument {
    uint32_t before, after;
  } argument{elements, 0};
  machine().meet(~0u, &argument, site, [](Machine::Lanes& lanes, uint32_t) {
    const auto at = [&](int r, int c) {
      return static_cast<Argument*>(lanes[r * 4 + c / 2])->before >> c % 2 * 16 & 0xFFFF;
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int column = lane / 4, row = lane % 4 * 2;
      static_cast<Argument*>(lanes[lane])->after = at(row, column) | at(row + 1, column) << 16;
    }
  });
  return argument.after;
}

template <class T>
void multiply_matrices(float* c, const uint32_t* a, const uint32_t* b, const Site& site) {
  struct Argument {
    float* c;
    const uint32_t *a, *b;
  } argument{c, a, b};
  machine().meet(~0u, &argument, site, [](Machine::Lanes& lanes, uint32_t) {
    ++machine().products;
    float left[16][16], right[16][8], sums[16][8];
    const auto low = [](uint32_t pair) { return gpu::to_float(T{static_cast<uint16_t>(pair)}); };
    const auto high = [](uint32_t pair) { return gpu::to_float(T{static_cast<uint16_t>(pair >> 16)}); };
    for (int lane = 0; lane < 32; ++lane) {
      const Argument& of = *static_cast<Argument*>(lanes[lane]);
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        const int row = group + i % 2 * 8, k = pair + i / 2 * 8;
        left[row][k] = low(of.a[i]);
        left[row][k + 1] = high(of.a[i]);
        sums[group + i / 2 * 8][pair + i % 2] = of.c[i];
      }
      for (int i = 0; i < 2; ++i) {
        right[pair + i * 8][group] = low(of.b[i]);
        right[pair + i * 8 + 1][group] = high(of.b[i]);
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column) sums[row][column] += left[row][k] * right[k][column];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const Argument& of = *static_cast<Argument*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) of.c[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
  });
}

template void multiply_matrices<gpu::bf16>(float*, const uint32_t*, const uint32_t*, const Site&);
template void multiply_matrices<gpu::f16>(float*, const uint32_t*, const uint32_t*, const Site&);

}  // namespace levit::emu
