// What AddressSanitizer and ThreadSanitizer are told where they take the place of the emulator's own checks: cmake
// -DLEVIT_SANITIZE=address or thread. They are a second opinion, by other means: the first also sees what a thread does
// to its registers' arrays, the second knows nothing of epochs. Without them all of this is nothing.
#pragma once

#include <cstddef>

#if defined(LEVIT_SANITIZE_ADDRESS)
#include <sanitizer/asan_interface.h>
#elif defined(LEVIT_SANITIZE_THREAD)
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_read_range(void* address, size_t bytes);
void __tsan_write_range(void* address, size_t bytes);
}
#endif

namespace levit::emu {

#if defined(LEVIT_SANITIZE_ADDRESS) || defined(LEVIT_SANITIZE_THREAD)
inline constexpr bool kOwnChecks = false;
#else
inline constexpr bool kOwnChecks = true;
#endif

// Memory that nobody may touch, and that anybody may.
inline void hide([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if defined(LEVIT_SANITIZE_ADDRESS)
  __asan_poison_memory_region(address, bytes);
#endif
}
inline void reveal([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if defined(LEVIT_SANITIZE_ADDRESS)
  __asan_unpoison_memory_region(address, bytes);
#endif
}

// An access that no compiler has instrumented; false: it is out of bounds.
inline bool report_access([[maybe_unused]] bool writes, [[maybe_unused]] const void* address,
                          [[maybe_unused]] size_t bytes) {
#if defined(LEVIT_SANITIZE_ADDRESS)
  return !__asan_region_is_poisoned(const_cast<void*>(address), bytes);
#elif defined(LEVIT_SANITIZE_THREAD)
  (writes ? __tsan_write_range : __tsan_read_range)(const_cast<void*>(address), bytes);
#endif
  return true;
}

// What a thread did before `release` happened before what another does after `acquire`.
inline void release([[maybe_unused]] void* order) {
#if defined(LEVIT_SANITIZE_THREAD)
  __tsan_release(order);
#endif
}
inline void acquire([[maybe_unused]] void* order) {
#if defined(LEVIT_SANITIZE_THREAD)
  __tsan_acquire(order);
#endif
}

// ThreadSanitizer's idea of a fiber.
class Identity {
 public:
  void create() {
#if defined(LEVIT_SANITIZE_THREAD)
    if (!context_) context_ = __tsan_create_fiber(0);
#endif
  }
  void become([[maybe_unused]] const Identity& other) {
#if defined(LEVIT_SANITIZE_THREAD)
    if (!context_) context_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(other.context_, __tsan_switch_to_fiber_no_sync);
#endif
  }

 private:
#if defined(LEVIT_SANITIZE_THREAD)
  void* context_ = nullptr;
#endif
};

}  // namespace levit::emu
