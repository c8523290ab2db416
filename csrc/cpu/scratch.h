// Working memory of the kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace levit {

constexpr int64_t kAlignment = 64;  // bytes of a cache line and of the widest vector

// Aligned memory that a thread keeps between calls: fresh pages cost more than the work on them.
class Scratch {
 public:
  void* get(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(::operator new(bytes, std::align_val_t(kAlignment)));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(kAlignment)); }
  };
  std::unique_ptr<void, Delete> memory_;
  int64_t size_ = 0;
};

// Parts of a thread's own memory, each aligned; they last until the thread asks for the same owner's again.
template <class T, auto kOwner, size_t kParts>
std::array<T*, kParts> scratch(const int64_t (&sizes)[kParts]) {
  constexpr int64_t kUnit = kAlignment / sizeof(T);
  const auto aligned = [](int64_t size) { return (size + kUnit - 1) / kUnit * kUnit; };
  static thread_local Scratch memory;
  int64_t total = 0;
  for (const int64_t size : sizes) total += aligned(size);
  T* next = static_cast<T*>(memory.get(total * sizeof(T)));
  std::array<T*, kParts> parts;
  for (size_t i = 0; i < kParts; next += aligned(sizes[i++])) parts[i] = next;
  return parts;
}

}  // namespace levit
