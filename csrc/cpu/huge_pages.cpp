// Large pages for a large buffer: fewer translations to look up, and the hardware's prefetch stops at every page.
#include "../ops.h"

#include <cstdint>

#include "../errors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace levit {

bool huge_pages(const Tensor& buffer) {
  if (!buffer.is_contiguous()) fail("huge_pages: buffer must be contiguous, got shape ", shape(buffer));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;  // x86-64's; where they are larger the system rounds by itself
  const auto begin = reinterpret_cast<uintptr_t>(buffer.data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + buffer.numel() * buffer.element_size()) / kPage * kPage;
  if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE) != 0) return false;
  // A buffer from the heap may lie on small pages that served before; they are joined here, the others when first used.
  // Older systems than Linux 6.1 refuse, and join them in time.
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
  madvise(reinterpret_cast<void*>(first), last - first, kCollapse);
  return true;
#else
  return false;
#endif
}

}  // namespace levit
