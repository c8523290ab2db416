// The warp-wide matrix instructions of sm_80, with the lane layouts of the PTX ISA.
#pragma once

#include <cstdint>

#include "site.h"

namespace levit::emu {

// ldmatrix: lanes 8 m .. 8 m + 7 name the rows of matrix m, 16 bytes each. Every lane gets of each matrix the elements
// 2 (lane % 4) and the next of row lane / 4; transposed, of column lane / 4.
void load_matrices(uint32_t* registers, int matrices, bool transposed, const void* row, const Site& site);

// movmatrix.trans: an 8 x 8 matrix that lies in registers as ldmatrix leaves it, transposed
uint32_t transpose_matrix(uint32_t elements, const Site& site);

// mma.m16n8k16: c [16, 8] += a [16, 16] b [16, 8], sums in float
template <class T>
void multiply_matrices(float* c, const uint32_t* a, const uint32_t* b, const Site& site);

}  // namespace levit::emu
