// A CUDA thread as a coroutine: a stack of its own, left and entered at synchronising operations only.
#pragma once

#include <cstddef>

#include "sanitizers.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace levit::emu {

class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 << 10;

  Fiber() = default;  // the thread that is running already
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch enters `entry`, which must never return. Whatever ran here before is given up.
  void start(void (*entry)());
  void switch_to(Fiber& other);

 private:
  char* stack_ = nullptr;
  Identity identity_;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace levit::emu
