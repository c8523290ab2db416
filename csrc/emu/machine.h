// Runs the blocks of a launch, one after another, on one thread of the CPU. The threads of a block are fibers that
// switch at synchronising operations only, in an order drawn from a seed.
//
// Not emulated: waiting for another thread in a loop, clusters, mbarrier, wgmma, TMA.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "report.h"
#include "site.h"
#include "threads.h"

namespace levit::emu {

struct AsyncCopy {
  void* to;
  const void* from;
  int bytes;  // what is not copied of them is filled with zeros
  int copied;
  Place place;
};

enum class State : uint8_t { kReady, kAtBarrier, kAtWarp, kDone };

struct Thread {
  Fiber fiber;
  Index3 index;
  int id = 0;
  State state = State::kReady;
  Site waits_at{"", 0};
  std::vector<AsyncCopy> open;                   // issued, in no group yet
  std::deque<std::vector<AsyncCopy>> committed;  // groups under way, oldest first
};

class Machine {
 public:
  using Lanes = std::array<void*, 32>;

  Memory memory;
  uint64_t seed = 1;
  bool random = true;  // false: always the lowest thread that can run

  // Runs a kernel to its end; false if it failed, and `failure` says how.
  bool launch(Size3 grid, Size3 block, size_t shared_bytes, std::function<void()> kernel);
  std::string failure() const { return failure_.text(); }
  [[noreturn]] void fail(Report report);
  [[noreturn]] void fail(const std::string& message, const Site& site);

  bool runs() const { return current_ != nullptr; }
  Thread& current() { return *current_; }
  int thread() const { return current_->id; }
  void barrier(const Site& site);
  // The lanes of the mask meet; the last to come calls `together` with all their arguments. Orders no memory.
  template <class F>
  void meet(uint32_t mask, void* argument, const Site& site, F&& together);
  void sync_warp(uint32_t mask, const Site& site);

  // Every place that synchronises has a number, given when it is first met. A mutation test switches one off.
  bool is_off(const char* what, const Site& site);
  const std::vector<std::pair<std::string, Site>>& switches() const { return switches_; }
  int switched_off = -1;
  uint64_t products = 0;  // mma instructions so far

  Index3 block_index;
  Size3 grid_size, block_size;

 private:
  // What those who meet again and again at one place are ordered by: nobody comes to the meeting after next before all
  // have left this one.
  struct Order {
    char of_meeting[2] = {};
    unsigned meetings = 0;

    char* next() { return &of_meeting[meetings % 2]; }
  };
  struct Meeting {
    uint32_t mask = 0, arrived = 0;
    Site site{"", 0};
    Lanes arguments{};
  };
  struct Warp {
    std::array<Meeting, 32> meetings;  // by their lowest lane: disjoint parts of a warp may meet separately
    uint32_t ready = 0, exited = 0;
    Order order;
  };

  static void enter();
  void run_block(size_t shared_bytes);
  void run_next();
  void to_host();
  void make_ready(int id);
  void release_barrier();
  void fail_deadlock();
  bool arrive(uint32_t mask, void* argument, const Site& site, Meeting*& meeting);
  int draw_warp();
  uint64_t draw();

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<int> urgency_;  // warps, the most urgent first
  std::function<void()> kernel_;
  std::vector<std::pair<std::string, Site>> switches_;
  Fiber host_;
  Thread* current_ = nullptr;
  Report failure_;
  bool failed_ = false, by_urgency_ = false;
  uint32_t ready_warps_ = 0;
  uint64_t random_state_ = 1;
  int count_ = 0, alive_ = 0, at_barrier_ = 0;
  Site barrier_site_{"", 0};
  Order barrier_order_;
  char begin_ = 0, end_ = 0;  // of a block
};

Machine& machine();

template <class F>
void Machine::meet(uint32_t mask, void* argument, const Site& site, F&& together) {
  Meeting* meeting = nullptr;
  if (arrive(mask, argument, site, meeting)) {
    together(meeting->arguments, mask);
    meeting->arrived = 0;
    for (uint32_t rest = mask; rest; rest &= rest - 1) make_ready((thread() & ~31) + std::countr_zero(rest));
  }
  run_next();
}

}  // namespace levit::emu
