"""Interleaved A/B timing: every variant of a case is checked first, then timed in turn within one process.

A machine that others use drifts by tens of per cent within seconds. Timing A, B, A, B, ... exposes all variants to the
same drift, so that the ratio of their medians holds even where the medians themselves do not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bench.ceilings import Ceilings

MAX_ROUNDS = 10_000


@dataclass(frozen=True)
class Case:
    """One question to the clock: the same work, done by several variants.

    `flops` and `bytes` are the least that the work needs, per call; one number for all variants, or one per variant.
    `check(output, expected)` raises if an output is wrong; expected is what `expected(variant)` returns, by default
    the output of the baseline. One call of a variant may do the work `calls` times; times are then per work.
    `absent` says of variants that cannot run here why. `threads`: the only thread counts to measure, None for any.
    """

    name: str
    size: str
    variants: Mapping[str, Callable[[], Any]]
    baseline: str
    flops: float | Mapping[str, float] | None = None
    bytes: float | Mapping[str, float] | None = None
    check: Callable[[Any, Any], None] = torch.testing.assert_close
    expected: Callable[[str], Any] | None = None
    calls: int = 1
    absent: Mapping[str, str] = field(default_factory=dict)
    threads: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.baseline not in self.variants:
            raise ValueError(f"baseline: expected one of {', '.join(self.variants)}; got {self.baseline!r}")
        if self.calls < 1:
            raise ValueError(f"calls: expected at least 1, got {self.calls}")


@dataclass(frozen=True)
class Row:
    """What was measured for one variant at one thread count; times in seconds, None where there is nothing to say.

    `status` is "ok" or the reason why the variant was not timed. `fma_share` and `read_share` are the fractions of the
    ceilings that the declared work fills; their sum is the share of the floor flops / FMA peak + bytes / bandwidth.
    `first` is the checked call, before all timing: compilation, and whatever else a variant does once.
    """

    case: str
    size: str
    variant: str
    baseline: str
    threads: int
    status: str
    rounds: int = 0
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    speedup: float | None = None
    gflops: float | None = None
    gbs: float | None = None
    fma_share: float | None = None
    read_share: float | None = None
    first: float | None = None


def run(
    cases: Iterable[Case],
    threads: int | Sequence[int] = 1,
    seconds: float = 1.0,
    min_rounds: int = 5,
) -> list[Row]:
    """Check, then time every case at every thread count for about `seconds` each, and at least `min_rounds` rounds.

    `cases` may be a generator: each case is dropped before the next one is built. For shares of ceilings see `shares`.
    """
    wanted = [threads] if isinstance(threads, int) else list(threads)
    rows: list[Row] = []
    for case in cases:
        counts = [count for count in wanted if case.threads is None or count in case.threads]
        # All checks come before all timing: a variant with state (a training step) has then taken the same few steps.
        checks = {}
        for count in counts:
            with thread_count(count):
                checks[count] = _check(case)
        for count in counts:
            with thread_count(count):
                rows += _time(case, count, *checks[count], seconds, min_rounds)
    return rows


def shares(rows: Iterable[Row], ceilings: Mapping[int, Ceilings]) -> list[Row]:
    """The rows with `fma_share` and `read_share`; `ceilings` maps thread counts to what was measured for them."""

    def share(rate: float | None, ceiling: float | None) -> float | None:
        return rate / ceiling if rate is not None and ceiling else None

    return [
        replace(
            row,
            fma_share=share(row.gflops, ceilings[row.threads].fma),
            read_share=share(row.gbs, ceilings[row.threads].read),
        )
        for row in rows
    ]


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """torch computes with `count` threads inside, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleave(
    variants: Mapping[str, Callable[[], Any]],
    seconds: float,
    min_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call, round by round. The starting variant rotates, so that none always follows the same one."""
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for call in variants.values():
            call()
        start, done = clock(), 0
        while names and done < MAX_ROUNDS and (done < min_rounds or clock() - start < seconds):
            first = done % len(names)
            for name in names[first:] + names[:first]:
                begin = clock()
                variants[name]()
                times[name].append(clock() - begin)
            done += 1
    finally:
        if collecting:
            gc.enable()
    return times


def _check(case: Case) -> tuple[dict[str, str], dict[str, float]]:
    """Why each wrong variant must not be timed; the seconds of every variant's call."""
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    order = [case.baseline, *(name for name in case.variants if name != case.baseline)]
    reference: Any = None
    for name in order:
        if case.expected is None and case.baseline in failures:
            failures[name] = "not checked: the baseline failed"
            continue
        try:
            begin = time.perf_counter()
            output = case.variants[name]()
            seconds[name] = time.perf_counter() - begin
            if name == case.baseline:
                reference = output
            case.check(output, case.expected(name) if case.expected else reference)
        except Exception as error:  # whatever a variant raises is a finding to report, not the end of the run
            message = " ".join(str(error).split())
            failures[name] = f"check failed: {type(error).__name__}: {message[:160]}"
    return failures, seconds


def _time(
    case: Case,
    threads: int,
    failures: Mapping[str, str],
    first: Mapping[str, float],
    seconds: float,
    min_rounds: int,
) -> list[Row]:
    sound = {name: call for name, call in case.variants.items() if name not in failures}
    times = {name: np.asarray(t) / case.calls for name, t in interleave(sound, seconds, min_rounds).items()}
    medians = {name: float(np.median(t)) for name, t in times.items()}
    rows = []
    for name in case.variants:
        common = (case.name, case.size, name, case.baseline, threads)
        if name in failures:
            rows.append(Row(*common, status=failures[name]))
            continue
        median = medians[name]
        p20, p80 = (float(p) for p in np.percentile(times[name], (20, 80)))
        rows.append(
            Row(
                *common,
                status="ok",
                rounds=len(times[name]),
                median=median,
                p20=p20,
                p80=p80,
                speedup=medians[case.baseline] / median if case.baseline in medians else None,
                gflops=_rate(case.flops, name, median),
                gbs=_rate(case.bytes, name, median),
                first=first[name],
            )
        )
    return rows


def _rate(amount: float | Mapping[str, float] | None, variant: str, seconds: float) -> float | None:
    """Billions per second."""
    value = amount.get(variant) if isinstance(amount, Mapping) else amount
    return None if value is None else value / seconds / 1e9
