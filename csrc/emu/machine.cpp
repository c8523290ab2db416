#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace levit::emu {

Machine& machine() {
  static Machine the_one;
  return the_one;
}

bool Machine::launch(Size3 grid, Size3 block, size_t shared_bytes, std::function<void()> kernel) {
  failed_ = false;
  count_ = static_cast<int>(block.count());
  kernel_ = std::move(kernel);
  grid_size = grid;
  block_size = block;
  random_state_ = seed * 0x9E3779B97F4A7C15u | 1;
  for (int i = 0; i < 8; ++i) draw();
  if (count_ < 32 || count_ > 1024 || count_ % 32 || shared_bytes > Memory::kSharedBytes) {
    failure_ = Report();
    failure_.add("no GPU launches " + std::to_string(count_) + " threads with " + std::to_string(shared_bytes) +
                 " bytes of shared memory (or these kernels should not)");
    return false;
  }
  while (static_cast<int>(threads_.size()) < count_) threads_.push_back(std::make_unique<Thread>());
  memory.begin_launch();
  std::vector<unsigned> order(grid.count());
  std::iota(order.begin(), order.end(), 0u);
  if (random) {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
  }
  for (const unsigned i : order) {
    block_index = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
    run_block(shared_bytes);
    if (failed_) return false;
  }
  return true;
}

void Machine::run_block(size_t shared_bytes) {
  const int warps = count_ / 32;
  alive_ = count_;
  at_barrier_ = 0;
  ready_warps_ = 0;
  by_urgency_ = draw() >> 30 & 1;
  warps_.assign(warps, Warp());
  urgency_.resize(warps);
  std::iota(urgency_.begin(), urgency_.end(), 0);
  for (int w = warps - 1; w > 0; --w) std::swap(urgency_[w], urgency_[draw() % (w + 1)]);
  memory.begin_block(shared_bytes);
  for (int i = 0; i < count_; ++i) {
    Thread& thread = *threads_[i];
    const unsigned at = i;
    thread.id = i;
    thread.index = {at % block_size.x, at / block_size.x % block_size.y, at / (block_size.x * block_size.y)};
    thread.open.clear();
    thread.committed.clear();
    thread.fiber.start(&enter);
    make_ready(i);
  }
  release(&begin_);
  run_next();  // comes back when all threads are done, or one failed
  acquire(&end_);
}

void Machine::enter() {
  Machine& self = machine();
  acquire(&self.begin_);
  self.kernel_();
  release(&self.end_);
  Thread& thread = self.current();
  if (!thread.open.empty() || !thread.committed.empty()) {
    const auto& copies = thread.open.empty() ? thread.committed.front() : thread.open;
    Report report;
    report.add("a thread exits with a cp.async under way");
    if (!copies.empty()) {
      report.add(", issued at ");
      report.add(copies.front().place);
      self.fail(std::move(report));
    }
  }
  thread.state = State::kDone;
  self.warps_[thread.id / 32].exited |= 1u << thread.id % 32;
  --self.alive_;
  if (self.at_barrier_ && self.at_barrier_ == self.alive_) self.release_barrier();
  self.run_next();
  std::abort();
}

// Two kinds of schedules, drawn block by block: any thread that can run; or, as in PCT (Burckhardt et al., 2010), the
// most urgent warp until it blocks, which now and then becomes the least urgent. The second lets one warp run far ahead
// of the others, which the first practically never does.
void Machine::run_next() {
  if (!ready_warps_) {
    if (alive_) fail_deadlock();
    to_host();
    return;
  }
  int warp, lane;
  if (random) {
    warp = draw_warp();
    const int turn = draw() >> 20 & 31;
    lane = (std::countr_zero(std::rotr(warps_[warp].ready, turn)) + turn) & 31;
  } else {
    warp = std::countr_zero(ready_warps_);
    lane = std::countr_zero(warps_[warp].ready);
  }
  if (!(warps_[warp].ready &= ~(1u << lane))) ready_warps_ &= ~(1u << warp);
  Thread* next = threads_[warp * 32 + lane].get();
  if (next == current_) return;
  Fiber& from = current_ ? current_->fiber : host_;
  current_ = next;
  from.switch_to(next->fiber);
}

int Machine::draw_warp() {
  const uint64_t number = draw();
  if (!by_urgency_) {
    const int turn = number >> 20 & 31;
    return (std::countr_zero(std::rotr(ready_warps_, turn)) + turn) & 31;
  }
  if ((number >> 40) % 256 == 0) std::rotate(urgency_.begin(), urgency_.begin() + 1, urgency_.end());
  for (const int warp : urgency_) {
    if (ready_warps_ >> warp & 1) return warp;
  }
  std::abort();
}

uint64_t Machine::draw() {  // xorshift64
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

void Machine::to_host() {
  Fiber& from = current_->fiber;
  current_ = nullptr;
  from.switch_to(host_);
}

void Machine::make_ready(int id) {
  threads_[id]->state = State::kReady;
  warps_[id / 32].ready |= 1u << id % 32;
  ready_warps_ |= 1u << id / 32;
}

void Machine::barrier(const Site& site) {
  if (at_barrier_ && !(site == barrier_site_)) {
    fail("threads meet at different barriers: " + text(barrier_site_) + " and", site);
  }
  barrier_site_ = current_->waits_at = site;
  current_->state = State::kAtBarrier;
  char* const order = barrier_order_.next();
  release(order);
  if (++at_barrier_ == alive_) release_barrier();
  run_next();
  acquire(order);
}

void Machine::release_barrier() {
  at_barrier_ = 0;
  ++barrier_order_.meetings;
  memory.sync_block();
  for (int i = 0; i < count_; ++i) {
    if (threads_[i]->state == State::kAtBarrier) make_ready(i);
  }
}

bool Machine::arrive(uint32_t mask, void* argument, const Site& site, Meeting*& meeting) {
  const int lane = thread() % 32;
  Warp& warp = warps_[thread() / 32];
  if (!(mask >> lane & 1)) fail("a lane is not in its own mask", site);
  if (warp.exited & mask) fail("the mask names a lane that has exited", site);
  meeting = &warp.meetings[std::countr_zero(mask)];
  if (!meeting->arrived) {
    meeting->mask = mask;
    meeting->site = site;
  } else if (meeting->mask != mask) {
    fail("lanes meet with different masks: " + text(meeting->site) + " and", site);
  } else if (!(meeting->site == site)) {
    fail("lanes meet at different warp operations: " + text(meeting->site) + " and", site);
  }
  meeting->arguments[lane] = argument;
  meeting->arrived |= 1u << lane;
  current_->waits_at = site;
  current_->state = State::kAtWarp;
  return meeting->arrived == mask;
}

void Machine::sync_warp(uint32_t mask, const Site& site) {
  // Part of a warp orders nothing here: that can only report too much, and the kernels have no use for it.
  Order& of_warp = warps_[thread() / 32].order;
  char* const order = of_warp.next();
  if (mask == ~0u) release(order);
  meet(mask, nullptr, site, [&](Lanes&, uint32_t met) {
    if (met != ~0u) return;
    ++of_warp.meetings;
    memory.sync_warp(thread() / 32);
  });
  if (mask == ~0u) acquire(order);
}

bool Machine::is_off(const char* what, const Site& site) {
  const auto same = [&](const auto& other) { return other.second == site && other.first == what; };
  const auto found = std::find_if(switches_.begin(), switches_.end(), same);
  const auto number = found - switches_.begin();
  if (found == switches_.end()) switches_.emplace_back(what, site);
  return number == switched_off;
}

void Machine::fail(Report report) {
  failure_ = std::move(report);
  failed_ = true;
  to_host();
  std::abort();  // a thread that failed is never entered again
}

void Machine::fail(const std::string& message, const Site& site) {
  Report report;
  report.add(message + " at " + text(site));
  fail(std::move(report));
}

void Machine::fail_deadlock() {
  std::string message = "deadlock: no thread can run;";
  const Thread* before = nullptr;
  for (int i = 0, shown = 0; i < count_ && shown < 4; ++i) {
    const Thread& thread = *threads_[i];
    if (thread.state == State::kDone) continue;
    if (before && before->state == thread.state && before->waits_at == thread.waits_at) continue;
    const char* where = thread.state == State::kAtBarrier ? " waits at __syncthreads " : " waits at a warp operation ";
    message += " thread " + std::to_string(i) + where + text(thread.waits_at) + ";";
    before = &thread;
    ++shown;
  }
  Report report;
  report.add(message);
  fail(std::move(report));
}

}  // namespace levit::emu
