// What a caller without CUDA's own headers needs of the runtime.
#include "gpu.h"

extern "C" {
int levit_use_device(int device);
const char* levit_error_text(int status);

// The runtime in this library keeps its own current device.
int levit_use_device(int device) { return levit::gpu::use_device(device); }

const char* levit_error_text(int status) { return levit::gpu::error_text(status); }
}
