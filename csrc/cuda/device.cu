// What a caller without CUDA's own headers needs of the runtime.
#include "gpu.h"

extern "C" {
int levit_use_device(int device);
const char* levit_error_text(int status);
int levit_driver_version();
int levit_runtime_version();

// The runtime in this library keeps its own current device.
int levit_use_device(int device) { return levit::gpu::use_device(device); }

// CUDA versions as CUDA gives them, 13000 for 13.0: what the driver serves, 0 without one, and what this library needs.
int levit_driver_version() { return levit::gpu::driver_version(); }
int levit_runtime_version() { return levit::gpu::kRuntimeVersion; }

const char* levit_error_text(int status) { return levit::gpu::error_text(status); }
}
