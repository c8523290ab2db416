"""`python -m levit_kernels.triton.static`: what the compiler makes of every kernel, for GPUs that are not here.

Every op is called at the published sizes with tensors that have no memory; the kernels that it would start, with their
default configurations, are compiled for each target. Gated (exit status 1): registers spilled to memory must be none,
and matrix products must use the matrix units where the precision has them. Everything else is reported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from .._published_calls import CALLS, DTYPES, Call
from ..backends.triton import OPS
from ._static_targets import TARGETS, Resources, compile_for
from .expert_attention import useful_share
from .launch import Launch, listening

_COLUMNS = (
    "kernel",
    "size",
    "dtype",
    "target",
    "warps",
    "regs",
    "spill B",
    "shared B",
    "occup.",
    "matrix",
    "code",
    "s",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line per kernel and target; 1 if one fails the gate, else 0."""
    parser = argparse.ArgumentParser(prog="python -m levit_kernels.triton.static", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="ops whose name contains NAME")
    parser.add_argument(
        "--targets", nargs="+", default=list(TARGETS), choices=TARGETS, metavar="T", help="default: all"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, metavar="D", help="default: all")
    parser.add_argument("--instructions", action="store_true", help="list how often each kind of instruction occurs")
    options = parser.parse_args(arguments)
    print(_line(_COLUMNS))
    failed = 0
    calls = [call for call in CALLS if not options.only or any(name in call.op for name in options.only)]
    for found in measure(calls, options.targets, options.dtypes):
        failed += found.failure is not None
        print(_line(_cells(found)) + (f"  FAILED: {found.failure}" if found.failure else ""), flush=True)
        if options.instructions:
            print("   ", ", ".join(f"{name} {count}" for name, count in found.instructions.most_common()))
    print(f"of expert_attention's arithmetic at the CIFAR size {_useful_share():.0%} are useful")
    print(f"{failed} failed" if failed else "all within the gate: nothing spilled, matrix units where products are")
    return int(failed > 0)


def measure(calls: Sequence[Call], targets: Sequence[str], dtypes: Sequence[str]) -> Iterator[Resources]:
    """Compiles the kernels of the calls, each once per target."""
    for call in calls:
        for dtype in dtypes:
            seen = set()
            for started in _launches(call, DTYPES[dtype]):
                for target in targets:
                    found = compile_for(started, target, call.size, dtype)
                    if found.key not in seen:
                        seen.add(found.key)
                        yield found


def _useful_share() -> float:
    """Counted from the tiles: tokens, pixels and columns that are not there are multiplied too."""
    patches, w_qkv = (torch.empty(shape, device="meta") for shape in ((256, 16, 192), (32, 100, 3, 3, 100)))
    return useful_share(patches.to(torch.bfloat16), w_qkv)


def _launches(call: Call, dtype: torch.dtype) -> list[Launch]:
    """The kernels that the call would start."""
    started: list[Launch] = []
    with listening(lambda launch: bool(started.append(launch))):
        call.run(OPS, dtype)
    return started


def _cells(found: Resources) -> tuple:
    share = f"{found.occupancy:.0%}"
    return (
        *(found.kernel, found.size, found.dtype, found.target, found.warps, found.registers, found.spilled),
        *(found.shared, share, found.matrix_instructions, sum(found.instructions.values()), f"{found.seconds:.1f}"),
    )


def _line(cells: Sequence) -> str:
    widths = (34, 26, 6, 8, 5, 5, 7, 8, 6, 6, 6, 5)
    return " ".join(
        str(c).ljust(w) if i < 4 else str(c).rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
