// The kernels are compiled with -fsanitize=thread, which calls one of these before every access to memory, and linked
// without ThreadSanitizer: the calls end here, and those that concern device memory are checked.
#include <cstddef>

#include "machine.h"

namespace levit::emu {

namespace {

inline void check(Kind kind, const void* address, size_t bytes, void* return_address) {
  Machine& m = machine();
  if (m.memory.holds(address) && m.runs() && bytes) {
    m.memory.access(kind, address, bytes, m.thread(), place_of_return(return_address));
  }
}

}  // namespace

}  // namespace levit::emu

#define LEVIT_HOOK(name, kind, bytes)                                                               \
  extern "C" void __tsan_##name(void* address);                                                    \
  extern "C" void __tsan_##name(void* address) {                                                   \
    levit::emu::check(levit::emu::Kind::kind, address, bytes, __builtin_return_address(0));         \
  }
#define LEVIT_HOOKS(bytes)                           \
  LEVIT_HOOK(read##bytes, kRead, bytes)              \
  LEVIT_HOOK(write##bytes, kWrite, bytes)            \
  LEVIT_HOOK(unaligned_read##bytes, kRead, bytes)    \
  LEVIT_HOOK(unaligned_write##bytes, kWrite, bytes)  \
  LEVIT_HOOK(volatile_read##bytes, kRead, bytes)     \
  LEVIT_HOOK(volatile_write##bytes, kWrite, bytes)

LEVIT_HOOKS(1)
LEVIT_HOOKS(2)
LEVIT_HOOKS(4)
LEVIT_HOOKS(8)
LEVIT_HOOKS(16)

extern "C" {
void __tsan_init();
void __tsan_func_entry(void*);
void __tsan_func_exit();
void __tsan_read_range(void* address, size_t bytes);
void __tsan_write_range(void* address, size_t bytes);
void __tsan_vptr_update(void**, void*);

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* address, size_t bytes) {
  levit::emu::check(levit::emu::Kind::kRead, address, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  levit::emu::check(levit::emu::Kind::kWrite, address, bytes, __builtin_return_address(0));
}
}
