#include "control.h"

#include <string>

#include "machine.h"

using levit::emu::machine;

extern "C" {

void* levit_emu_allocate(size_t bytes) { return machine().memory.allocate(bytes); }
void levit_emu_upload(void* to, const void* from, size_t bytes) { machine().memory.upload(to, from, bytes); }
void levit_emu_release_all() { machine().memory.release_all(); }

void levit_emu_schedule(uint64_t seed, int random) {
  machine().seed = seed;
  machine().random = random != 0;
}

const char* levit_emu_switch(int number) {
  static std::string name;
  const auto& all = machine().switches();
  if (number < 0 || number >= static_cast<int>(all.size())) return nullptr;
  name = all[number].first + " " + levit::emu::text(all[number].second);
  return name.c_str();
}

void levit_emu_switch_off(int number) { machine().switched_off = number; }

uint64_t levit_emu_products() { return machine().products; }

const char* levit_emu_failure() { return levit::emu::failure(); }

}
