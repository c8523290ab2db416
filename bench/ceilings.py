"""What this machine can do at most, measured in the same run as the benchmarks that are compared with it.

A GEMM of torch is no ceiling: where its library does not know the CPU it reaches half of the silicon. So the ceilings
are a loop of fused multiply-adds that never leaves the registers and a stream of reads from memory, both in native
code; oneDNN's GEMM stands beside them as the best that plain torch offers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

# One repetition takes well under a millisecond: some then fit between the time slices of other processes.
FMA_ITERATIONS = 200_000
READ_BYTES = 1 << 24
BUFFER_BYTES = 1 << 28  # read slice by slice: far beyond a last-level cache, so that every slice comes from memory
GEMM_SIZES = ((256, 512, 512), (512, 512, 512), (1024, 512, 512))  # rows, inputs, outputs


@dataclass(frozen=True)
class Ceilings:
    """GFLOP/s and GB/s at one thread count: the best of many repetitions; None where `reason` says why.

    `bf16_dot` is the vector dot product of bfloat16 pairs, 0 on a CPU without it (AVX512_BF16).
    """

    threads: int
    gemm: float | None
    fma: float | None = None
    bf16_dot: float | None = None
    read: float | None = None
    reason: str = ""

    def better(self, other: Ceilings) -> Ceilings:
        """The higher of both, figure by figure; both have the same thread count."""

        def higher(name: str) -> float | None:
            return max((v for v in (getattr(self, name), getattr(other, name)) if v is not None), default=None)

        figures = {name: higher(name) for name in ("gemm", "fma", "bf16_dot", "read")}
        return replace(self, **figures)

    def __str__(self) -> str:
        def figure(value: float | None, unit: str) -> str:
            return "not measured" if value is None else f"{value:.1f} {unit}"

        text = (
            f"{self.threads} thread{'s' if self.threads > 1 else ''}: FMA loop {figure(self.fma, 'GFLOP/s')}, "
            f"bf16 dot {'absent' if self.bf16_dot == 0 else figure(self.bf16_dot, 'GFLOP/s')}, "
            f"oneDNN GEMM {figure(self.gemm, 'GFLOP/s')}, read stream {figure(self.read, 'GB/s')}"
        )
        return f"{text} ({self.reason})" if self.reason else text


def update(best: dict[int, Ceilings], threads: Sequence[int], seconds: float = 1.0) -> None:
    """Measure again at each thread count, and keep in `best` the better of the old and the new figures.

    Called before and after every case, so that a neighbour who was busy for some seconds lowers no ceiling.
    """
    for count in threads:
        new = measure(count, seconds)
        best[count] = best[count].better(new) if count in best else new


def measure(threads: int, seconds: float = 1.0) -> Ceilings:
    """The ceilings with `threads` threads, in about `seconds` altogether.

    The best repetition counts, not the median: what a machine reached once it can do, and a neighbour on the same
    cores must not make a kernel look closer to the limit than it is.
    """
    budget = seconds / 4
    gemm, gemm_reason = _gemm(threads, budget)
    ops, native_reason = _native_ops()
    reason = "; ".join(text for text in (gemm_reason, native_reason) if text)
    if ops is None:
        return Ceilings(threads, gemm, reason=reason)
    slices = itertools.cycle(torch.ones(BUFFER_BYTES, dtype=torch.uint8).split(READ_BYTES))
    return Ceilings(
        threads,
        gemm,
        fma=_best(lambda: ops.fma_peak(FMA_ITERATIONS, threads), budget),
        bf16_dot=_best(lambda: ops.bf16_dot_peak(FMA_ITERATIONS, threads), budget),
        read=_best(lambda: ops.read_stream(next(slices), threads), budget),
        reason=reason,
    )


def _best(rate: Callable[[], float], seconds: float, at_least: int = 3) -> float:
    end = time.perf_counter() + seconds
    rates = [rate() for _ in range(at_least)]
    while time.perf_counter() < end:
        rates.append(rate())
    return max(rates)


def _gemm(threads: int, seconds: float) -> tuple[float | None, str]:
    if not torch.backends.mkldnn.is_available():
        return None, "GEMM: this torch was built without oneDNN"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_gemm_rate(*size, seconds / len(GEMM_SIZES)) for size in GEMM_SIZES), ""
    finally:
        torch.set_num_threads(before)


def _gemm_rate(rows: int, inputs: int, outputs: int, seconds: float) -> float:
    x, weight = torch.rand(rows, inputs), torch.rand(outputs, inputs)

    def rate() -> float:
        start = time.perf_counter()
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return 2e-9 * rows * inputs * outputs / (time.perf_counter() - start)

    return _best(rate, seconds)


def _native_ops() -> tuple[object | None, str]:
    from levit_kernels import native

    try:
        native.load()
    except Exception as error:  # whatever keeps the extension from loading is the reason to report
        return None, f"FMA loop and read stream: {error}"
    return torch.ops.levit_native, ""
