"""The CUDA C++ kernels of csrc/cuda: one file per op that checks nothing, allocates and starts them.

They have a library of their own, `_cuda.so`, with a plain C interface: it knows nothing of torch, so one build serves
every torch, and the same calls start the kernels in csrc/emu when tests put the emulator in the library's place.
"""
