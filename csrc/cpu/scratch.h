// Working memory of the kernels.
#pragma once

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

}  // namespace levit
