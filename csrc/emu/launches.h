// Comes before the launch code of csrc/cuda where nothing is to be started: a listener is told what would be. For
// levit_kernels/_cuda_launches.py.
#pragma once

#include <cstddef>

using LevitListener = void (*)(const char* kernel, const char* where, unsigned threads, size_t shared_bytes);

extern "C" {
inline LevitListener levit_listener = nullptr;
[[gnu::used]] inline const char* levit_error_text(int) { return "nothing is started here"; }
}

// As the source has it, with template arguments by their names; what these are stands in the name of the function.
#define LEVIT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (levit_listener(#kernel, __PRETTY_FUNCTION__, (block).x, static_cast<size_t>(shared_bytes)), 0)
