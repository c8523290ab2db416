#include "threads.h"

#include "machine.h"

namespace levit::emu {

const Index3& thread_index() { return machine().current().index; }
const Index3& block_index() { return machine().block_index; }
const Size3& block_size() { return machine().block_size; }
const Size3& grid_size() { return machine().grid_size; }
unsigned char* shared_memory() { return machine().memory.shared(); }

void sync_threads(const Site& site) {
  if (!machine().is_off("__syncthreads", site)) machine().barrier(site);
}

void sync_warp(uint32_t mask, const Site& site) {
  if (!machine().is_off("__syncwarp", site)) machine().sync_warp(mask, site);
}

uint64_t exchange(uint32_t mask, uint64_t value, int source, const Site& site) {
  struct Argument {
    uint64_t given, taken;
    int source;
  } argument{value, value, source};
  machine().meet(mask, &argument, site, [](Machine::Lanes& lanes, uint32_t met) {
    for (uint32_t rest = met; rest; rest &= rest - 1) {
      auto& mine = *static_cast<Argument*>(lanes[std::countr_zero(rest)]);
      if (met >> mine.source & 1) mine.taken = static_cast<Argument*>(lanes[mine.source])->given;
    }
  });
  return argument.taken;
}

uint32_t ballot(uint32_t mask, bool vote, const Site& site) {
  struct Argument {
    bool vote;
    uint32_t votes;
  } argument{vote, 0};
  machine().meet(mask, &argument, site, [](Machine::Lanes& lanes, uint32_t met) {
    uint32_t votes = 0;
    for (uint32_t rest = met; rest; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      votes |= static_cast<uint32_t>(static_cast<Argument*>(lanes[lane])->vote) << lane;
    }
    for (uint32_t rest = met; rest; rest &= rest - 1) {
      static_cast<Argument*>(lanes[std::countr_zero(rest)])->votes = votes;
    }
  });
  return argument.votes;
}

void atomic_access(void* address, size_t bytes, const Site& site) {
  Machine& m = machine();
  if (m.memory.holds(address)) m.memory.access(Kind::kAtomic, address, bytes, m.thread(), place_of(site));
}

void require(bool holds, const Site& site) {
  if (!holds) machine().fail("an assertion fails", site);
}

int launch(Size3 grid, Size3 block, size_t shared_bytes, std::function<void()> kernel) {
  return machine().launch(grid, block, shared_bytes, std::move(kernel)) ? 0 : 1;
}

const char* failure() {
  static std::string words;
  words = machine().failure();
  return words.c_str();
}

}  // namespace levit::emu
