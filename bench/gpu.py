"""`python -m bench.gpu --minutes 8`: one prepared run for a GPU machine: check everything, time everything, one report.

Most important first. It stays inside its minutes: a step starts only if its share is left, and what has been measured
is on disk after every step. Nothing is timed that has not passed its check.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import gpu_cases, gpu_models, gpu_sizes, report
from bench.gpu_cases import BACKENDS, UNPROVEN, GpuCase
from bench.gpu_report import Report
from levit_kernels import info
from levit_kernels.backends import registry

RESULTS = report.ROOT / "bench" / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL = {"experts": 3, "batch": 8}


@dataclass(frozen=True)
class Step:
    """A part of the run; it starts if `seconds` are left. `run(report, deadline)` looks at the clock itself too."""

    name: str
    seconds: float
    run: Callable[[Report, float], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a check failed, 2 without a GPU, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, metavar="M", help="the run's whole length (8)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, in order; needs no GPU")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="default: bench/results/gpu-DEVICE-DATE")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes: expected a positive number")
    if options.dry_run:
        print(f"{options.minutes:g} minutes; a step starts only if its seconds are left")
        for number, step in enumerate(steps(), 1):
            print(f"{number:3}  {step.seconds:5.0f} s  {step.name}")
        return 0
    if not torch.cuda.is_available():
        print("bench.gpu: torch sees no GPU here; --dry-run says what would be done", file=sys.stderr)
        return 2
    found = Report(torch.cuda.get_device_name())
    folder = options.out or RESULTS / f"gpu-{found.device}-{report.stamp()['date'][:10]}".replace(" ", "-").lower()
    carry_out(steps(), found, time.monotonic() + 60 * options.minutes, folder)
    print(*found.save(folder), sep="\n")
    return int(any(row.get("status") == "wrong" for row in found.rows))


def carry_out(
    plan: Sequence[Step], found: Report, deadline: float, folder: Path, clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs the steps that fit, in order, and saves after each; one that fails is a finding, not the end."""
    for step in plan:
        if deadline - clock() < step.seconds:
            found.notes.append(f"not run, no time was left: {step.name}")
            continue
        print(step.name, flush=True)
        try:
            step.run(found, deadline)
        except Exception as error:  # whatever a step raises is reported, and the next one runs
            found.notes.append(f"{step.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        found.save(folder)


def steps() -> list[Step]:
    """The whole plan, most important first."""
    plan = [Step("environment, and who takes each op and why", 1, _environment)]
    for dtype in DTYPES:
        for case in gpu_sizes.cases(**SMALL)[:-1]:
            plan.append(Step(f"check {case.op} {dtype}: {', '.join(BACKENDS)} with gradients", 7, _check(case, dtype)))
    plan.append(Step("whole model: fused against reference on the device", 12, gpu_models.parity))
    plan.append(Step("ceilings: copy bandwidth and matrix products", 5, _ceilings))
    for dtype in reversed(DTYPES):
        for case in gpu_sizes.cases():
            plan.append(Step(f"time {case.op} {case.size} {dtype}: plain and as a CUDA graph", 11, _time(case, dtype)))
    plan.append(Step(f"time one Algorithm 1 step, K={gpu_models.EXPERTS}, reference and fused", 20, gpu_models.step))
    for name in UNPROVEN:
        small, large = (_with_kernel(name, cases) for cases in (gpu_sizes.cases(**SMALL)[:-1], gpu_sizes.cases()))
        for dtype in DTYPES:
            for case in small:
                plan.append(Step(f"check {case.op} {dtype}: {name} with gradients", 3, _check(case, dtype, [name])))
        for dtype in reversed(DTYPES):
            for case in large:
                plan.append(Step(f"time {case.op} {case.size} {dtype}: {name}", 3, _time(case, dtype, [name])))
    return plan


def _with_kernel(name: str, cases: Sequence[GpuCase]) -> list[GpuCase]:
    """The cases whose op that backend has a kernel for."""
    return [case for case in cases if case.op in registry.backends()[name].ops]


def _environment(found: Report, deadline: float) -> None:
    for title, lines in info.sections():
        found.notes += [f"{title}: {line}" for line in lines]


def _check(case: GpuCase, dtype: str, names: Sequence[str] = BACKENDS) -> Callable[[Report, float], None]:
    def run(found: Report, deadline: float) -> None:
        args = case.make("cuda", DTYPES[dtype])
        for name in names:
            if reason := gpu_cases.refusal(name, case.op, args):
                found.add("check", op=case.op, dtype=dtype, backend=name, status=f"refused: {reason}")
                continue
            began = time.monotonic()
            share, plain = gpu_cases.worst_error(case, "cuda", DTYPES[dtype], name)
            status = "ok" if share <= 1 else "wrong"
            if status == "ok":
                found.right.add((case.op, dtype, name))
            seconds = round(time.monotonic() - began, 2)  # the first call compiles
            row = {"error_over_bound": round(share, 3), "plain_error": f"{plain:.2e}", "seconds": seconds}
            found.add("check", op=case.op, dtype=dtype, backend=name, status=status, **row)

    return run


def _ceilings(found: Report, deadline: float) -> None:
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source))
    found.add("ceiling", what="copy", gbs=round(2 * source.numel() * 4 / seconds / 1e9, 1))
    for name, dtype in DTYPES.items():
        a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
        seconds = median_seconds(lambda a=a: a @ a, repeats=5)
        found.add("ceiling", what=f"matmul {name}", tflops=round(2 * 8192**3 / seconds / 1e12, 1))


def _time(case: GpuCase, dtype: str, names: Sequence[str] = ()) -> Callable[[Report, float], None]:
    """Of the backends named, or of all variants of the case."""

    def run(found: Report, deadline: float) -> None:
        args = case.make("cuda", DTYPES[dtype])
        medians: dict[str, float] = {}
        for name, call in case.on_backends(names, args) if names else case.variants(args):
            checked = name not in (*BACKENDS, *UNPROVEN) or (case.op, dtype, name) in found.right
            if not checked or time.monotonic() > deadline:
                why = "time is out" if checked else "not timed: its check did not pass"
                found.add("time", op=case.op, size=case.size, dtype=dtype, variant=name, status=why)
                continue
            began = time.monotonic()
            call()
            torch.cuda.synchronize()
            first = time.monotonic() - began
            for how, timed in _plain_and_graph(call):
                medians[f"{name}, {how}"] = seconds = median_seconds(timed)
                width = torch.finfo(DTYPES[dtype]).bits // 8
                row = {"first_call_s": round(first, 2), "median_us": round(seconds * 1e6, 2)}
                row |= {"tflops": round(case.flops / seconds / 1e12, 2)}
                row |= {"gbs": round(width * case.numbers / seconds / 1e9, 1)}
                row |= found.shares(dtype, row["tflops"], row["gbs"])
                eager = medians.get("reference, plain")
                row |= {"over_reference": round(eager / seconds, 2)} if eager else {}
                found.add("time", op=case.op, size=case.size, dtype=dtype, variant=name, how=how, status="ok", **row)

    return run


def _plain_and_graph(call: Callable[[], Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The call itself, and its kernels replayed without the CPU where they can be captured."""
    yield "plain", call
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # it looks at values on the CPU
        return
    yield "graph", graph.replay


def median_seconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median of event-timed calls, each behind a write that leaves nothing of its arguments in the L2 cache."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):
        call()
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


if __name__ == "__main__":
    sys.exit(main())
