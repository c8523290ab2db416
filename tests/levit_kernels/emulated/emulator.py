"""Builds the emulated CUDA kernels with CMake and calls them through ctypes, on copies of torch tensors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from levit_kernels.gates import broadcast_strides, expand

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "emulated"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
A100 = {"processors": 108, "shared_bytes": 163 << 10}


class EmulatorError(RuntimeError):
    """What the emulator reports about a kernel."""


class Gates(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(f"per_{x}", ctypes.c_int64) for x in ("image", "expert", "head")]


class Emulator:
    """The library of emulated kernels and the memory of its device."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name, result, arguments in (
            ("levit_emu_allocate", ctypes.c_void_p, [ctypes.c_size_t]),
            ("levit_emu_upload", None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]),
            ("levit_emu_release_all", None, []),
            ("levit_emu_schedule", None, [ctypes.c_uint64, ctypes.c_int]),
            ("levit_emu_switch", ctypes.c_char_p, [ctypes.c_int]),
            ("levit_emu_switch_off", None, [ctypes.c_int]),
            ("levit_emu_failure", ctypes.c_char_p, []),
            ("levit_emu_products", ctypes.c_uint64, []),
        ):
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def reset(self) -> None:
        """Frees all device memory; all synchronisation works again."""
        self.library.levit_emu_release_all()
        self.library.levit_emu_switch_off(-1)
        self.library.levit_emu_schedule(1, 1)

    def schedule(self, seed: int) -> None:
        """The order of threads and blocks of the launches that follow; 0: no chance in it."""
        self.library.levit_emu_schedule(max(seed, 1), seed > 0)

    def upload(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a dense copy on the device."""
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        size = tensor.numel() * tensor.element_size()
        address = self.library.levit_emu_allocate(size)
        self.library.levit_emu_upload(address, tensor.data_ptr(), size)
        return address

    def gates(self, gates: torch.Tensor) -> Gates:
        """Gates in any layout, as the kernels take them."""
        expanded = expand(gates.float().contiguous())
        return Gates(self.upload(gates.float()), *broadcast_strides(expanded))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Memory that nobody has written yet."""
        return self.library.levit_emu_allocate(torch.Size(shape).numel() * dtype.itemsize)

    def download(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), address, tensor.numel() * dtype.itemsize)
        return tensor

    def check(self, status: int) -> None:
        """Raises what the emulator reports unless the launch went well."""
        if status == 1:
            raise EmulatorError(self.library.levit_emu_failure().decode())
        assert status == 0, f"launch refused: {status}"

    def switches(self, *files: str) -> dict[int, str]:
        """Where the launches so far synchronise, by number; those in the files named."""
        found = {}
        while name := self.library.levit_emu_switch(len(found)):
            found[len(found)] = name.decode()
        return {number: name for number, name in found.items() if any(f" {file}:" in name for file in files)}

    def switch_off(self, number: int) -> None:
        """Leaves one place out of all synchronisation; -1: none."""
        self.library.levit_emu_switch_off(number)


def build() -> Path:
    """The library, built anew where its sources are newer."""
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    if missing:
        raise FileNotFoundError(f"the emulated CUDA kernels are built with cmake and ninja; missing: {missing}")
    _run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja")
    _run("cmake", "--build", BUILD)
    return BUILD / "liblevit_emulated.so"


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert not done.returncode, f"{command[:2]} failed:\n{done.stdout}\n{done.stderr}"
