"""`python -m levit_kernels.cuda_static`: what nvcc makes of every CUDA kernel, for GPUs that are not here.

Gated (exit status 1): no warning of the compiler, no register spilled, no local memory. Registers, the warps that an SM
can hold by them, and matrix instructions are reported; shared memory is chosen at launch (`*Plan` in csrc/cuda). Works
in a checkout only: installed packages have no sources.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"
TARGETS = ("sm_80", "sm_90")
_FLAGS = ["-std=c++20", "-cubin", "-Werror", "all-warnings", "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror"]
_COLUMNS = ("kernel", "target", "regs", "warps", "barriers", "HMMA", "LDGSTS", "LDSM", "code")
_WIDTHS = (56, 6, 4, 5, 8, 5, 6, 5, 6)


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes on one target; without nvdisasm `instructions` is None."""

    name: str
    target: str
    registers: int
    barriers: int
    instructions: Counter | None

    @property
    def warps(self) -> int:
        """That an SM can hold: 64 Ki registers, dealt out to warps in units of 256, at most 64 warps."""
        return min(64, 65536 // (-(-self.registers * 32 // 256) * 256))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line per kernel and target; 1 if the gate holds one up, else 0."""
    parser = argparse.ArgumentParser(prog="python -m levit_kernels.cuda_static", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="sources whose name contains NAME")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), metavar="T", help="default: sm_80 sm_90")
    options = parser.parse_args(arguments)
    sources = [x for x in sorted(SOURCES.glob("*.cu")) if not options.only or any(y in x.name for y in options.only)]
    if not sources:
        parser.error(f"no sources to compile in {SOURCES}: this works in a checkout")
    print(_line(_COLUMNS))
    failed = 0
    for source in sources:
        for target in options.targets:
            try:
                for kernel in compile_for(source, target):
                    print(_line(_cells(kernel)), flush=True)
            except ValueError as error:
                failed += 1
                print(f"{source.name} {target} FAILED:\n{error}", flush=True)
    print(f"{failed} failed" if failed else "all within the gate: no warning, nothing spilled, no local memory")
    return int(failed > 0)


def compile_for(source: Path, target: str) -> Iterator[Kernel]:
    """Compiles the kernels of a source. Raises ValueError with the compiler's words if it objects to anything, and
    FileNotFoundError without a compiler."""
    nvcc = find_nvcc()
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        command = [nvcc, *_FLAGS, f"-arch={target}", source, "-o", cubin]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise ValueError("\n".join(line for line in done.stdout.splitlines() if "ptxas info" not in line))
        instructions = _instructions(cubin)
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?Used (\d+) registers, used (\d+) barriers", done.stdout, re.S
    )
    for symbol, registers, barriers in found:
        counts = None if instructions is None else instructions[symbol]
        yield Kernel(_plain_name(symbol), target, int(registers), int(barriers), counts)


def find_nvcc() -> str:
    """CUDA_HOME's, else the one on PATH, else pip's. Raises FileNotFoundError."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    pips = [path for folder in sys.path for path in sorted(Path(folder).glob("nvidia/cu[0-9]*"))]
    for nvcc in (home and f"{home}/bin/nvcc", shutil.which("nvcc"), *(f"{path}/bin/nvcc" for path in pips)):
        if nvcc and Path(nvcc).exists():
            return nvcc
    raise FileNotFoundError("no nvcc in CUDA_HOME, on PATH or among pip's packages (nvidia-cuda-nvcc)")


def _instructions(cubin: Path) -> dict[str, Counter] | None:
    disassembler = _find_nvdisasm()
    if disassembler is None:
        return None
    text = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=True).stdout
    found: dict[str, Counter] = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", part, re.M)
        found[re.match(r"\w+", part).group()] = Counter(opcodes)
    return found


def _find_nvdisasm() -> str | None:
    beside = Path(find_nvcc()).with_name("nvdisasm")
    of_triton = [Path(folder, "triton/backends/nvidia/bin/nvdisasm") for folder in sys.path]
    found = shutil.which("nvdisasm") or next((str(path) for path in (beside, *of_triton) if path.exists()), None)
    return found


def _plain_name(symbol: str) -> str:
    filt = shutil.which("c++filt")
    if filt is None:
        return symbol
    name = subprocess.run([filt, symbol], capture_output=True, text=True).stdout.strip()
    name = re.sub(r"^void |levit::(gpu::)?|\(.*", "", name)
    return name.replace("__nv_bfloat16", "bf16").replace("__half", "fp16").replace("float", "fp32")


def _cells(kernel: Kernel) -> tuple:
    counts = kernel.instructions
    shown = ("-",) * 4 if counts is None else (counts["HMMA"], counts["LDGSTS"], counts["LDSM"], counts.total())
    return (kernel.name, kernel.target, kernel.registers, kernel.warps, kernel.barriers, *shown)


def _line(cells: Sequence) -> str:
    aligned = (
        str(c).ljust(w) if i < 2 else str(c).rjust(w) for i, (c, w) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return " ".join(aligned)


if __name__ == "__main__":
    sys.exit(main())
