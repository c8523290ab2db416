"""What a block of each CUDA kernel takes at the published sizes, as the launch code of csrc/cuda chooses it.

That code is compiled for this machine's CPU, with launches that only tell of themselves (csrc/emu/launches.h), and
every op is called on tensors without memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ._occupancy import GPUS
from ._published_calls import CALLS, DTYPES
from .backends.cuda import OPS
from .cuda.runtime import Runtime, substitute

_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_size_t)
_SOMEWHERE = 256  # where tensors lie that nobody reads: aligned, and not null


@dataclass(frozen=True, order=True)
class Block:
    """Bytes of shared memory that the launch asks for, threads, and the size that takes so much."""

    shared: int
    threads: int
    size: str


def largest_blocks(library: Path, target: str) -> dict[str, Block]:
    """Kernel, as `plain_name` has it -> of the published sizes the one whose blocks take the most shared memory there.

    Kernels that no published size starts are not in it.
    """
    found: dict[str, Block] = {}
    listener = _Listener(library, target)
    composed = [op for op in OPS if not hasattr(listener.library, f"levit_{op}")]
    ops = {**OPS, **dict.fromkeys(composed, lambda *args: None)}
    with substitute(listener):
        for call in (x for x in CALLS if x.op in OPS):
            for dtype in DTYPES.values():
                listener.heard.clear()
                call.run(ops, dtype)
                for name, threads, shared in listener.heard:
                    block = Block(shared, threads, call.size)
                    found[name] = max(block, found.get(name, block))
    return found


def build(sources: Sequence[Path], folder: str) -> Path:
    """The library that `largest_blocks` asks. Raises CalledProcessError, and FileNotFoundError without a compiler."""
    library = Path(folder, "launches.so")
    header = sources[0].parents[1] / "emu" / "launches.h"
    command = [*shlex.split(os.environ.get("CXX") or "c++"), "-std=c++20", "-O0", "-w", "-fPIC", "-shared"]
    subprocess.run([*command, "-include", header, "-x", "c++", *sources, "-o", library], check=True)
    return library


def plain_name(name: str) -> str:
    """Of a kernel with its template arguments: without namespaces, types as the tables of this package name them."""
    name = re.sub(r"^void |\(anonymous namespace\)::|levit::|gpu::|\(.*", "", name)
    types = {"__nv_bfloat16": "bf16", "__half": "fp16", "f16": "fp16", "float": "fp32"}
    return re.sub(r"\w+", lambda word: types.get(word.group(), word.group()), name)


class _Listener(Runtime):
    """Takes every tensor for one on a GPU of the target, and hears what would be started there."""

    def __init__(self, library: Path, target: str) -> None:
        super().__init__(ctypes.CDLL(str(library)))
        self.heard: list[tuple[str, int, int]] = []  # kernel, threads, shared memory
        self._gpu = GPUS[target]
        self._hear = _LISTENER(self._told)
        address = ctypes.cast(self._hear, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.library, "levit_listener").value = address

    def serves(self, device: torch.device) -> bool:
        return True

    def gpu(self, device: torch.device) -> tuple[int, int]:
        return self._gpu.processors, self._gpu.shared_of_block

    def source(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else _SOMEWHERE

    def result(self, tensor: torch.Tensor | None) -> int | None:
        return self.source(tensor)

    def start(self, function: str, call: ctypes.Structure, device: torch.device) -> None:
        self.check(function, getattr(self.library, function)(ctypes.byref(call), None))

    def _told(self, kernel: bytes, where: bytes, threads: int, shared: int) -> None:
        """Both compilers write where = "... [with T = float; int kSteps = 7]", one of them without types, by commas."""
        arguments = dict(re.findall(r"(\w+) = ([\w:]+)", where.decode()))
        name = re.sub(r"\w+", lambda word: arguments.get(word.group(), word.group()), kernel.decode().strip("()"))
        self.heard.append((plain_name(name), threads, shared))
