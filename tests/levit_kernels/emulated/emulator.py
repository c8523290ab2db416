"""Builds the emulated CUDA kernels with CMake and puts them in the place of the CUDA library, on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch

from levit_kernels.cuda.runtime import Runtime

ROOT = Path(__file__).parents[3]
SANITIZER = os.environ.get("LEVIT_SANITIZE", "")  # in place of the emulator's own checks: see CMakeLists.txt
BUILD = ROOT / "build" / "-".join(filter(None, ["emulated", SANITIZER]))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
A100_SHARED_BYTES = 163 << 10


class EmulatorError(RuntimeError):
    """What the emulator reports about a kernel."""


class Emulator(Runtime):
    """The emulated kernels. Device memory holds a copy of every tensor of one call, and nothing else.

    `processors` and `shared_bytes` are those of the GPU that the launch code sees: with one processor as many images as
    can share a block. Of the tensors `withheld` (parts of arguments) nothing is copied: to read them is an error.
    """

    def __init__(self, library: Path) -> None:
        super().__init__(ctypes.CDLL(str(library)))
        for name, result, arguments in (
            ("levit_emu_allocate", ctypes.c_void_p, [ctypes.c_size_t]),
            ("levit_emu_upload", None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]),
            ("levit_emu_release_all", None, []),
            ("levit_emu_schedule", None, [ctypes.c_uint64, ctypes.c_int]),
            ("levit_emu_switch", ctypes.c_char_p, [ctypes.c_int]),
            ("levit_emu_switch_off", None, [ctypes.c_int]),
            ("levit_emu_products", ctypes.c_uint64, []),
        ):
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self.reset()

    def reset(self) -> None:
        """All synchronisation works again, device memory is free, the GPU is a small part of an A100."""
        self.processors, self.shared_bytes = 1, A100_SHARED_BYTES
        self.withheld: list[torch.Tensor] = []
        self.launches = 0
        self.switch_off(-1)
        self.schedule(1)
        self._release()

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def gpu(self, device: torch.device) -> tuple[int, int]:
        return self.processors, self.shared_bytes

    def source(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        begin, end = _bytes_of(tensor)
        address = self.library.levit_emu_allocate(end - begin)
        for withheld in (x for x in self.withheld if begin <= _bytes_of(x)[0] < end):
            hidden_begin, hidden_end = _bytes_of(withheld)
            self._upload(address, begin, hidden_begin)
            address, begin = address + hidden_end - begin, hidden_end
        self._upload(address, begin, end)
        return address - (begin - _bytes_of(tensor)[0])

    def result(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous()
        address = self.library.levit_emu_allocate(tensor.numel() * tensor.element_size())
        self._results.append((tensor, address))
        return address

    def start(self, function: str, call: ctypes.Structure, device: torch.device) -> None:
        self.launches += 1
        try:
            self.check(function, getattr(self.library, function)(ctypes.byref(call), None))
            for tensor, address in self._results:
                ctypes.memmove(tensor.data_ptr(), address, tensor.numel() * tensor.element_size())
        finally:
            self._release()

    def check(self, function: str, status: int) -> None:
        if status == 1:
            raise EmulatorError(self.library.levit_error_text(status).decode())
        super().check(function, status)

    def schedule(self, seed: int) -> None:
        """The order of threads and blocks of the launches that follow; 0: no chance in it."""
        self.library.levit_emu_schedule(max(seed, 1), seed > 0)

    def products(self) -> int:
        """How many multiply-adds the tensor cores have done so far."""
        return self.library.levit_emu_products() * 16 * 8 * 16

    def switches(self, *files: str) -> dict[int, str]:
        """Where the launches so far synchronise, by number; those in the files named."""
        found = {}
        while name := self.library.levit_emu_switch(len(found)):
            found[len(found)] = name.decode()
        return {number: name for number, name in found.items() if any(f" {file}:" in name for file in files)}

    def switch_off(self, number: int) -> None:
        """Leaves one place out of all synchronisation; -1: none."""
        self.library.levit_emu_switch_off(number)

    def _upload(self, address: int, begin: int, end: int) -> None:
        if begin < end:
            self.library.levit_emu_upload(address, begin, end - begin)

    def _release(self) -> None:
        self._results: list[tuple[torch.Tensor, int]] = []
        self.library.levit_emu_release_all()


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """From its first to behind its last number; what lies between them belongs to it as well."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def build() -> Path:
    """The library, built anew where its sources are newer."""
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    if missing:
        raise FileNotFoundError(f"the emulated CUDA kernels are built with cmake and ninja; missing: {missing}")
    _run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DLEVIT_SANITIZE={SANITIZER}")
    _run("cmake", "--build", BUILD)
    return BUILD / "liblevit_emulated.so"


def _run(*command: object) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no sanitizer for compilers
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=plain)
    assert not done.returncode, f"{command[:2]} failed:\n{done.stdout}\n{done.stderr}"
