// Device memory with a shadow: for every two bytes who wrote and who read them last, and since when they may be read.
//
// Time is counted in epochs: a __syncthreads begins a new one for the block, a __syncwarp one for its warp. Two
// accesses are ordered if they are of one thread, if a __syncthreads of their block lies between them, if they are of
// one warp and a __syncwarp lies between them, or if they belong to different launches. Otherwise they race if one of
// them writes, whatever the schedule happened to be.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace levit::emu {

// What of the program made an access: an offset of the machine code, or a Site (see report.h).
using Place = int32_t;

enum class Kind { kRead, kWrite, kAtomic };

class Memory {
 public:
  static constexpr size_t kSharedBytes = 227 << 10;  // the most that a block can have on sm_90
  static constexpr size_t kBytes = 64 << 20;
  static constexpr int kMaxWarps = 32;

  Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Global memory, uninitialised, with a margin around it. The host's accesses are not checked.
  void* allocate(size_t bytes);
  void upload(void* to, const void* from, size_t bytes);
  void release_all();

  void begin_launch() { launch_ = block_ = ++epoch_; }
  void begin_block(size_t shared_bytes);  // shared memory is new, and poisoned with NaN
  void sync_block() { ++epoch_; }
  void sync_warp(int warp) { ++warp_epoch_[warp]; }

  unsigned char* shared() { return bytes_; }
  bool holds(const void* address) const { return offset(address) < kBytes; }

  // Fails the launch (see Machine::fail) if the access is out of bounds, meets uninitialised memory or a copy in
  // flight, or races.
  void access(Kind kind, const void* address, size_t bytes, int thread, Place place);
  // cp.async: from its issue to the wait that covers it nobody may touch the destination.
  void copy_issued(void* to, size_t bytes, int thread, Place place);
  void copy_landed(void* to, size_t bytes, int thread, Place place);

 private:
  struct Cell {
    uint32_t write_epoch, read_epoch, write_warp_epoch, read_warp_epoch;
    Place write_place, read_place;
    uint16_t writer, reader;  // reader: a thread, or kManyLanes + its warp, or kManyWarps
    uint16_t state;
  };

  size_t offset(const void* address) const {
    return static_cast<size_t>(static_cast<const unsigned char*>(address) - bytes_);
  }
  void read(Cell& cell, int thread, Place place, bool atomic, const void* address);
  void write(Cell& cell, int thread, Place place, bool atomic, const void* address);
  bool ordered(uint32_t epoch, uint32_t warp_epoch, int other, int thread) const;
  bool reads_ordered(const Cell& cell, int thread) const;
  [[noreturn]] void fail(const char* what, Kind kind, int thread, Place place, const void* address, int other = -1,
                         Kind other_kind = Kind::kRead, Place other_place = 0) const;

  unsigned char* bytes_;
  Cell* cells_;
  size_t used_ = 0, shared_bytes_ = 0;
  uint32_t epoch_ = 1, block_ = 1, launch_ = 1;
  std::array<uint32_t, kMaxWarps> warp_epoch_{};
};

}  // namespace levit::emu
