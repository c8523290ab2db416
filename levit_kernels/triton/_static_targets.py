"""Compiles a launch for a GPU that need not be here and reads its resources from the machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .._occupancy import WARPS, blocks_per_sm
from .launch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MATRIX = re.compile(r"[HIQ]MMA|HGMMA|UTCHMMA|UTC\w*MMA|v_mfma|v_smfmac")
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one target. `spilled` counts bytes per thread (NVIDIA: 4 per access of local memory)."""

    kernel: str
    size: str
    dtype: str
    target: str
    warps: int
    registers: int
    spilled: int
    shared: int
    occupancy: float
    instructions: Counter
    seconds: float
    needs_matrix: bool
    key: tuple = field(repr=False)

    @property
    def matrix_instructions(self) -> int:
        return sum(count for name, count in self.instructions.items() if _MATRIX.match(name))

    @property
    def failure(self) -> str | None:
        """What the gate objects to, or None."""
        if self.spilled:
            return f"{self.spilled} bytes of registers spilled"
        if self.needs_matrix and not self.matrix_instructions:
            return "its products do not use the matrix units"
        return None


def compile_for(launch: Launch, target: str, size: str, dtype: str) -> Resources:
    """Compiles and measures; the launch is specialised as Triton would do it at run time."""
    if target.startswith("gfx") and "PRECISION" in launch.meta:  # see launch.dot_precision
        launch = launch._replace(meta={**launch.meta, "PRECISION": "ieee"})
    signature, constants, attributes, options = specialise(launch)
    options["num_warps"] = launch.threads // TARGETS[target].warp_size
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    began = time.perf_counter()
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    seconds = time.perf_counter() - began
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    if target.startswith("sm_"):
        registers, spilled, instructions = _nvidia(compiled.asm["cubin"], launch.kernel.__name__)
        occupancy = blocks_per_sm(target, registers, shared, warps) * warps / WARPS
    else:
        registers, spilled, instructions = _amd(compiled.asm["amdgcn"])
        occupancy = _amd_occupancy(registers, shared, warps)
    return Resources(
        _name(launch),
        *(size, dtype, target, warps, registers, spilled, shared, occupancy, instructions, seconds),
        needs_matrix="tt.dot" in compiled.asm["ttir"],
        key=(target, launch.kernel.__name__, str(signature), str(constants), str(attributes), str(options)),
    )


def _name(launch: Launch) -> str:
    return f"{launch.kernel.fn.__module__.rsplit('.', 1)[-1]}.{launch.kernel.__name__.lstrip('_')}"


def specialise(launch: Launch) -> tuple[dict, dict, dict, dict]:
    """-> signature, constexprs, attributes and options: ones and constants folded, multiples of 16 known as such."""
    names, signature, constants, attributes = launch.kernel.arg_names, {}, {}, {}
    given = dict(zip(names, launch.args, strict=False)) | {k: v for k, v in launch.meta.items() if k in names}
    declared = {p.name for p in launch.kernel.params if p.is_constexpr}
    for i, name in enumerate(names):
        value = given[name]
        if name in declared or value is None or (type(value) is int and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
            continue
        signature[name] = _type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in launch.meta.items() if k not in names}
    return signature, constants, attributes, {"debug": bool(launch.kernel.debug), **options}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _nvidia(cubin: bytes, name: str) -> tuple[int, int, Counter]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        assembly = _tool("nvdisasm", "-c", file.name)
    found = re.finditer(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", assembly, re.MULTILINE)
    instructions = Counter(m.group(1) for m in found)
    registers = int(re.search(rf"Function {name}:\s+REG:(\d+)", usage).group(1))
    # the frame that cuobjdump calls STACK also holds what an assertion prints: the accesses tell
    return registers, 4 * (instructions["STL"] + instructions["LDL"]), instructions


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()}")
    return done.stdout


def _amd(assembly: str) -> tuple[int, int, Counter]:
    def figure(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly).group(1))

    found = re.finditer(r"^\s+([a-z]\w+)(?: |$)", assembly, re.MULTILINE)
    instructions = Counter(m.group(1) for m in found)
    # vgpr_count holds the accumulation registers too: one file of 512 serves both
    return figure("vgpr_count"), max(4 * figure("vgpr_spill_count"), figure("private_segment_fixed_size")), instructions


def _amd_occupancy(registers: int, shared: int, warps: int) -> float:
    """Share of the 8 waves per SIMD, 4 SIMDs, 512 registers per lane and 64 KiB of LDS of a compute unit."""
    by_registers = 4 * min(8, 512 // (-(-max(registers, 1) // 8) * 8)) // warps
    by_shared = (64 << 10) // shared if shared else 32
    return min(by_registers, by_shared, 32 // warps) * warps / 32
