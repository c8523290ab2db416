"""The library of CUDA kernels: loads it when it is first asked for, and starts what is in it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .. import native
from ..gates import broadcast_strides, expand

LIBRARY = Path(__file__).parents[1] / "_cuda.so"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # LevitType of csrc/cuda/types.h
DOES_NOT_FIT = -1
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Gates(ctypes.Structure):
    """LevitGates."""

    _fields_ = [("data", ctypes.c_void_p)] + [(f"per_{x}", ctypes.c_int64) for x in ("image", "expert", "head")]


class Runtime:
    """Starts kernels of a library on torch's GPUs, in the current stream."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.levit_error_text.restype = ctypes.c_char_p
        library.levit_latent_distance_partials.restype = ctypes.c_int64
        library.levit_latent_distance_partials.argtypes = [ctypes.c_int64]
        library.levit_expansion_distances_partials.restype = ctypes.c_int64

    def serves(self, device: torch.device) -> bool:
        """Whether tensors there can be given to the kernels."""
        return device.type == "cuda"

    def gpu(self, device: torch.device) -> tuple[int, int]:
        """-> processors, and bytes of shared memory that a block may have."""
        return _gpu(device)

    def source(self, tensor: torch.Tensor | None) -> int | None:
        """Where a kernel reads the tensor."""
        return None if tensor is None else tensor.data_ptr()

    def result(self, tensor: torch.Tensor | None) -> int | None:
        """Where a kernel writes the tensor."""
        return None if tensor is None else tensor.data_ptr()

    def gates(self, gates: torch.Tensor | None) -> Gates:
        """Gates in any layout; `gates` must live until the kernel has started."""
        return Gates() if gates is None else Gates(self.source(gates), *broadcast_strides(expand(gates)))

    def start(self, function: str, call: ctypes.Structure, device: torch.device) -> None:
        """Raises RuntimeError if not all kernels of a call can be started, OutOfMemoryError if memory is why.

        Nothing is half-written then: results are new tensors that nobody has seen.
        """
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            status = self.library.levit_use_device(torch.cuda.current_device())
            status = status or getattr(self.library, function)(ctypes.byref(call), ctypes.c_void_p(stream))
        self.check(function, status)

    def check(self, function: str, status: int) -> None:
        """Raises RuntimeError, or OutOfMemoryError, which is one, unless the status is that of a success."""
        if status == DOES_NOT_FIT:
            raise RuntimeError(f"{function}: no block can hold these sizes")
        if status:
            kind = torch.OutOfMemoryError if status == OUT_OF_MEMORY else RuntimeError
            raise kind(f"{function}: {self.library.levit_error_text(status).decode()}")


_substitute: Runtime | None = None


def current() -> Runtime:
    """The runtime that kernels start in. Raises RuntimeError, with the reason, if there is none."""
    return _substitute or _loaded()


@contextmanager
def substitute(runtime: Runtime) -> Iterator[None]:
    """Puts another runtime in the library's place, for tests without a GPU."""
    global _substitute
    before, _substitute = _substitute, runtime
    try:
        yield
    finally:
        _substitute = before


def substituted() -> bool:
    return _substitute is not None


@functools.cache
def _loaded() -> Runtime:
    if not LIBRARY.exists():
        raise RuntimeError(f"the CUDA kernels were not built: {native.build_info().get('cuda_reason', 'no record')}")
    try:
        return Runtime(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{LIBRARY.name} does not load: {error}; reinstall levit-kernels") from error


@functools.cache
def _gpu(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
