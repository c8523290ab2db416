// cp.async: what is copied arrives as late as the hardware may deliver it, at the wait that covers it.
#pragma once

#include "site.h"

namespace levit::emu {

// bytes: 4, 8 or 16; the destination beyond `copied` is filled with zeros
void copy_async(void* to, const void* from, int bytes, int copied, const Site& site);
void commit_copies();
void wait_for_copies(int groups_left, const Site& site);

}  // namespace levit::emu
