#include "async_copy.h"

#include <cstdint>
#include <cstring>

#include "machine.h"

namespace levit::emu {

void copy_async(void* to, const void* from, int bytes, int copied, const Site& site) {
  Machine& m = machine();
  const auto misaligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; };
  if (misaligned(to) || (copied && misaligned(from))) m.fail("misaligned cp.async", site);
  const auto* bytes_to = static_cast<unsigned char*>(to);
  if (bytes_to < m.memory.shared() || bytes_to + bytes > m.memory.shared() + Memory::kSharedBytes) {
    m.fail("cp.async to what is not shared memory", site);
  }
  const Place place = place_of(site);
  if (copied) m.memory.access(Kind::kRead, from, copied, m.thread(), place);
  m.memory.copy_issued(to, bytes, m.thread(), place);
  m.current().open.push_back({to, from, bytes, copied, place});
}

void commit_copies() {
  Thread& thread = machine().current();
  thread.committed.push_back(std::move(thread.open));
  thread.open.clear();
}

void wait_for_copies(int groups_left, const Site& site) {
  Machine& m = machine();
  if (m.is_off("cp.async.wait_group", site)) return;
  auto& committed = m.current().committed;
  while (static_cast<int>(committed.size()) > groups_left) {
    for (const AsyncCopy& copy : committed.front()) {
      m.memory.copy_landed(copy.to, copy.bytes, m.thread(), copy.place);
      std::memcpy(copy.to, copy.from, copy.copied);
      std::memset(static_cast<char*>(copy.to) + copy.copied, 0, copy.bytes - copy.copied);
    }
    committed.pop_front();
  }
}

}  // namespace levit::emu
