#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "machine.h"
#include "report.h"
#include "sanitizers.h"

namespace levit::emu {

namespace {

constexpr size_t kCellBytes = 2;  // the smallest type of the kernels
constexpr size_t kMarginBytes = 256;
constexpr uint16_t kManyLanes = 0x8000, kManyWarps = 0xFFFF;
enum State : uint16_t { kLive = 1, kWritten = 2, kInFlight = 4, kReadElsewhere = 8, kByAtomic = 16 };

int warp_of(uint16_t reader) { return reader & kManyLanes ? reader & ~kManyLanes : reader / 32; }

template <class T>
T* reserve(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

}  // namespace

Memory::Memory()
    : bytes_(reserve<unsigned char>(kBytes)), cells_(reserve<Cell>(kBytes / kCellBytes * sizeof(Cell))) {
  release_all();
}

void* Memory::allocate(size_t bytes) {
  const size_t begin = used_ + kMarginBytes, whole = (bytes + kCellBytes - 1) / kCellBytes;
  if (begin + bytes > kBytes) throw std::bad_alloc();
  used_ = begin + (bytes + kMarginBytes - 1) / kMarginBytes * kMarginBytes;
  reveal(bytes_ + begin, bytes);
  std::memset(bytes_ + begin, 0xFF, bytes);
  Cell fresh{};
  fresh.state = kLive;
  std::fill_n(cells_ + begin / kCellBytes, whole, fresh);
  return bytes_ + begin;
}

void Memory::upload(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  for (size_t i = 0; i < bytes; i += kCellBytes) cells_[(offset(to) + i) / kCellBytes].state |= kWritten;
}

void Memory::release_all() {
  shared_bytes_ = 0;
  hide(bytes_, kBytes);
  madvise(cells_, kBytes / kCellBytes * sizeof(Cell), MADV_DONTNEED);
  used_ = (kSharedBytes + kMarginBytes - 1) / kMarginBytes * kMarginBytes;
}

void Memory::begin_block(size_t shared_bytes) {
  block_ = ++epoch_;
  warp_epoch_.fill(0);
  hide(bytes_, kSharedBytes);
  reveal(bytes_, shared_bytes);
  std::memset(bytes_, 0xFF, shared_bytes);  // NaN in every floating-point type
  std::fill_n(cells_, std::max(shared_bytes, shared_bytes_) / kCellBytes, Cell{});
  shared_bytes_ = shared_bytes;
  for (size_t i = 0; i < shared_bytes / kCellBytes; ++i) cells_[i].state = kLive;
}

void Memory::access(Kind kind, const void* address, size_t bytes, int thread, Place place) {
  if constexpr (!kOwnChecks) {
    if (!report_access(kind != Kind::kRead, address, bytes)) fail("out of bounds", kind, thread, place, address);
    return;
  }
  const size_t begin = offset(address);
  for (size_t at = begin / kCellBytes; at <= (begin + bytes - 1) / kCellBytes; ++at) {
    if (kind == Kind::kRead) {
      read(cells_[at], thread, place, false, address);
    } else {
      if (kind == Kind::kAtomic) read(cells_[at], thread, place, true, address);
      write(cells_[at], thread, place, kind == Kind::kAtomic, address);
    }
  }
}

void Memory::copy_issued(void* to, size_t bytes, int thread, Place place) {
  access(Kind::kWrite, to, bytes, thread, place);
  std::memset(to, 0xFF, bytes);
  for (size_t i = 0; i < bytes; i += kCellBytes) cells_[(offset(to) + i) / kCellBytes].state |= kInFlight;
}

void Memory::copy_landed(void* to, size_t bytes, int thread, Place place) {
  for (size_t i = 0; i < bytes; i += kCellBytes) cells_[(offset(to) + i) / kCellBytes].state &= ~kInFlight;
  access(Kind::kWrite, to, bytes, thread, place);
}

void Memory::read(Cell& cell, int thread, Place place, bool atomic, const void* address) {
  if (!(cell.state & kLive)) fail("out of bounds", Kind::kRead, thread, place, address);
  if (cell.state & kInFlight) {
    fail("cp.async still in flight", Kind::kRead, thread, place, address, cell.writer, Kind::kWrite, cell.write_place);
  }
  if (!(cell.state & kWritten)) fail("uninitialised", Kind::kRead, thread, place, address);
  const bool both_atomic = atomic && cell.state & kByAtomic;
  if (!both_atomic && !ordered(cell.write_epoch, cell.write_warp_epoch, cell.writer, thread)) {
    fail("race", Kind::kRead, thread, place, address, cell.writer, Kind::kWrite, cell.write_place);
  }
  if (atomic) return;  // the write that follows stands for both
  const uint32_t warp_epoch = warp_epoch_[thread / 32];
  if (cell.read_epoch < launch_) {
    cell.state &= ~kReadElsewhere;
    cell.reader = thread;
  } else if (cell.read_epoch < epoch_) {
    if (cell.read_epoch < block_) cell.state |= kReadElsewhere;
    cell.reader = thread;
  } else if (cell.reader != kManyWarps) {
    if (warp_of(cell.reader) != thread / 32) {
      cell.reader = kManyWarps;
    } else if (cell.read_warp_epoch < warp_epoch) {
      cell.reader = thread;
    } else if (cell.reader != thread) {
      cell.reader = kManyLanes + thread / 32;
    }
  }
  cell.read_epoch = epoch_;
  cell.read_warp_epoch = warp_epoch;
  cell.read_place = place;
}

void Memory::write(Cell& cell, int thread, Place place, bool atomic, const void* address) {
  if (!(cell.state & kLive)) fail("out of bounds", Kind::kWrite, thread, place, address);
  if (cell.state & kInFlight) {
    fail("cp.async still in flight", Kind::kWrite, thread, place, address, cell.writer, Kind::kWrite, cell.write_place);
  }
  const bool both_atomic = atomic && cell.state & kByAtomic;
  if (!both_atomic && !ordered(cell.write_epoch, cell.write_warp_epoch, cell.writer, thread)) {
    fail("race", Kind::kWrite, thread, place, address, cell.writer, Kind::kWrite, cell.write_place);
  }
  if (!reads_ordered(cell, thread)) {
    fail("race", Kind::kWrite, thread, place, address, cell.reader, Kind::kRead, cell.read_place);
  }
  cell.state = (cell.state & ~kByAtomic) | kWritten | (atomic ? kByAtomic : 0);
  cell.write_epoch = epoch_;
  cell.write_warp_epoch = warp_epoch_[thread / 32];
  cell.writer = thread;
  cell.write_place = place;
}

bool Memory::ordered(uint32_t epoch, uint32_t warp_epoch, int other, int thread) const {
  if (epoch < launch_) return true;
  if (epoch < block_) return false;  // of another block of this launch
  if (other == thread || epoch < epoch_) return true;
  return other / 32 == thread / 32 && warp_epoch < warp_epoch_[thread / 32];
}

bool Memory::reads_ordered(const Cell& cell, int thread) const {
  if (cell.read_epoch < launch_) return true;
  if (cell.read_epoch < block_ || cell.state & kReadElsewhere) return false;
  if (cell.read_epoch < epoch_ || cell.reader == thread) return true;
  if (cell.reader == kManyWarps || warp_of(cell.reader) != thread / 32) return false;
  return cell.read_warp_epoch < warp_epoch_[thread / 32];
}

void Memory::fail(const char* what, Kind kind, int thread, Place place, const void* address, int other, Kind other_kind,
                  Place other_place) const {
  const auto name = [](Kind k) { return k == Kind::kRead ? "read" : "write"; };
  const size_t at = offset(address);
  Report report;
  report.add(std::string(what) + ": " + name(kind) + " of " + (at < kSharedBytes ? "shared" : "global") + " byte " +
             std::to_string(at < kSharedBytes ? at : at - kSharedBytes) + " by thread " + std::to_string(thread) +
             " at ");
  report.add(place);
  if (other >= 0) {
    const std::string who = other == kManyWarps ? "several warps"
                            : other & kManyLanes ? "lanes of warp " + std::to_string(other & ~kManyLanes)
                                                 : "thread " + std::to_string(other);
    report.add(std::string(", against a ") + name(other_kind) + " by " + who + " at ");
    report.add(other_place);
  }
  machine().fail(std::move(report));
}

}  // namespace levit::emu
