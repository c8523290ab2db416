#include "fiber.h"

#include <sys/mman.h>

#include <new>

namespace levit::emu {

namespace {

constexpr size_t kGuardBytes = 4096;  // a stack overflow faults instead of spoiling a neighbour

#if defined(__x86_64__)
// Saves what a function call must preserve and nothing else: swapcontext asks the kernel for the signal mask each time.
__attribute__((naked, noinline)) void exchange(void** /*save*/, void* /*load*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
#endif

}  // namespace

Fiber::~Fiber() {
  if (stack_) munmap(stack_, kStackBytes);
}

void Fiber::start(void (*entry)()) {
  if (!stack_) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stack_ = static_cast<char*>(memory);
    mprotect(stack_, kGuardBytes, PROT_NONE);
  }
  reveal(stack_, kStackBytes);  // who is given up leaves the margins of its variables behind
  identity_.create();
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(stack_ + kStackBytes - 64);
  *--top = nullptr;  // the return address of entry, which keeps the stack aligned as behind a call
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
}

void Fiber::switch_to(Fiber& other) {
  identity_.become(other.identity_);
#if defined(__x86_64__)
  exchange(&stack_pointer_, other.stack_pointer_);
#else
  swapcontext(&context_, &other.context_);
#endif
}

}  // namespace levit::emu
