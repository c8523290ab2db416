"""`python -m levit_kernels.cuda_static`: what nvcc makes of every CUDA kernel, for GPUs that are not here.

Gated (exit status 1): no warning of the compiler, no stack, no register spilled, no access of local memory (LDL, STL),
and blocks that an SM can hold. Everything else is reported: registers and fixed shared memory, then of the published
size whose blocks take the most shared memory the bytes that the launch asks for and the threads, and how many such
blocks and warps an SM holds by all of these; "-" where no published size starts the kernel. Works in a checkout only:
installed packages have no sources.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ._cuda_launches import Block, build, largest_blocks, plain_name
from ._occupancy import GPUS, blocks_per_sm
from ._ptxas import Kernel, read

SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"
TARGETS = ("sm_80", "sm_90")
_FLAGS = ["-std=c++20", "-cubin", "-Werror", "all-warnings", "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror"]
_OPCODES = ("HMMA", "LDGSTS", "LDSM", "LDL", "STL")
_COLUMNS = {
    **{"kernel": 46, "target": 6, "regs": 4, "stack": 5, "spill": 5, "fixed": 5, "launch": 6, "threads": 7},
    **{"blocks": 6, "warps": 5, "barriers": 8, "HMMA": 5, "LDGSTS": 6, "LDSM": 5, "LDL": 3, "STL": 3, "code": 6},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line per kernel and target; 1 if the gate holds one up, else 0."""
    parser = argparse.ArgumentParser(prog="python -m levit_kernels.cuda_static", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="sources whose name contains NAME")
    parser.add_argument(
        "--targets", nargs="+", default=list(TARGETS), choices=GPUS, metavar="T", help="default: sm_80 sm_90"
    )
    options = parser.parse_args(arguments)
    sources = [x for x in sorted(SOURCES.glob("*.cu")) if not options.only or any(y in x.name for y in options.only)]
    if not sources:
        parser.error(f"no sources to compile in {SOURCES}: this works in a checkout")
    print(_line(list(_COLUMNS)))
    failed, blocks = 0, launches(options.targets)
    for source in sources:
        for target in options.targets:
            try:
                for kernel in compile_for(source, target):
                    block = blocks[target].get(kernel.name)
                    failure = kernel.failure or unlaunchable(kernel, block)
                    failed += failure is not None
                    print(_line(_cells(kernel, block)) + (f"  FAILED: {failure}" if failure else ""), flush=True)
            except ValueError as error:
                failed += 1
                print(f"{source.name} {target} FAILED:\n{error}", flush=True)
    if _find_nvdisasm() is None:
        print("no nvdisasm on PATH, beside nvcc or in triton: no instructions were counted")
    print(f"{failed} failed" if failed else "all within the gate: no warning, nothing spilled, no local memory")
    return int(failed > 0)


def launches(targets: Sequence[str]) -> dict[str, dict[str, Block]]:
    """Target -> kernel -> its largest block at the published sizes."""
    sources = [path for path in sorted(SOURCES.glob("*.cu")) if path.stem != "device"]  # it starts nothing
    with tempfile.TemporaryDirectory() as folder:
        library = build(sources, folder)
        return {target: largest_blocks(library, target) for target in targets}


def occupancy(kernel: Kernel, block: Block) -> tuple[int, int]:
    """-> blocks, and their warps, that an SM holds."""
    warps = -(-block.threads // 32)
    blocks = blocks_per_sm(kernel.target, kernel.registers, kernel.shared + block.shared, warps)
    return blocks, blocks * warps


def unlaunchable(kernel: Kernel, block: Block | None) -> str | None:
    """Why no SM can hold a block, or None."""
    return f"no SM holds a block of {block.size}" if block and not occupancy(kernel, block)[0] else None


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
        assembly = _assembly(cubin)
    for kernel in read(done.stdout, assembly, target):
        yield dataclasses.replace(kernel, name=_demangled(kernel.name))


def find_nvcc() -> str:
    """CUDA_HOME's, else the one on PATH, else pip's. Raises FileNotFoundError."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    pips = [path for folder in sys.path for path in sorted(Path(folder).glob("nvidia/cu[0-9]*"))]
    for nvcc in (home and f"{home}/bin/nvcc", shutil.which("nvcc"), *(f"{path}/bin/nvcc" for path in pips)):
        if nvcc and Path(nvcc).exists():
            return nvcc
    raise FileNotFoundError("no nvcc in CUDA_HOME, on PATH or among pip's packages (nvidia-cuda-nvcc)")


def _assembly(cubin: Path) -> str | None:
    disassembler = _find_nvdisasm()
    if disassembler is None:
        return None
    return subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=True).stdout


def _find_nvdisasm() -> str | None:
    beside = Path(find_nvcc()).with_name("nvdisasm")
    of_triton = [Path(folder, "triton/backends/nvidia/bin/nvdisasm") for folder in sys.path]
    found = shutil.which("nvdisasm") or next((str(path) for path in (beside, *of_triton) if path.exists()), None)
    return found


def _demangled(symbol: str) -> str:
    filt = shutil.which("c++filt")
    if filt is None:
        return symbol
    return plain_name(subprocess.run([filt, symbol], capture_output=True, text=True).stdout.strip())


def _cells(kernel: Kernel, block: Block | None) -> tuple:
    counts = kernel.instructions
    shown = ("-",) * 6 if counts is None else (*(counts[opcode] for opcode in _OPCODES), counts.total())
    launch = ("-",) * 4 if block is None else (block.shared, block.threads, *occupancy(kernel, block))
    taken = (kernel.registers, kernel.stack, kernel.spilled, kernel.shared)
    return (kernel.name, kernel.target, *taken, *launch, kernel.barriers, *shown)


def _line(cells: Sequence) -> str:
    widths = _COLUMNS.values()
    aligned = (
        str(c).ljust(w) if i < 2 else str(c).rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )
    return " ".join(aligned)


if __name__ == "__main__":
    sys.exit(main())
