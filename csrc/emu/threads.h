// What a kernel may ask about itself, and how its threads meet and exchange values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "site.h"

namespace levit::emu {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
struct Size3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr Size3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned count() const { return x * y * z; }
};

const Index3& thread_index();
const Index3& block_index();
const Size3& block_size();
const Size3& grid_size();
unsigned char* shared_memory();

void sync_threads(const Site& site);
void sync_warp(uint32_t mask, const Site& site);

// The value of lane `source`, all lanes of the mask at once; one's own if the source is not in the mask.
uint64_t exchange(uint32_t mask, uint64_t value, int source, const Site& site);
uint32_t ballot(uint32_t mask, bool vote, const Site& site);

// Before an atomic operation on `bytes` at `address`; threads switch elsewhere, so it needs nothing more.
void atomic_access(void* address, size_t bytes, const Site& site);

void require(bool holds, const Site& site);

// 0, or 1 if the kernel failed
int launch(Size3 grid, Size3 block, size_t shared_bytes, std::function<void()> kernel);

const char* failure();  // of the last launch that failed

}  // namespace levit::emu
