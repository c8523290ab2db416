"""What a bar can measure: speeds when first asked for, accuracies from the results that runs left.

An accuracy comes from `bench/results/accuracy/*.json`: the results.json of a `levit train` run, which carries the
commit that produced it. What the expansion rule found stands in `bench/results/detection.csv`, written by
`levit report detection`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import memory, model_cases
from bench.ceilings import Ceilings, update
from bench.harness import Case, Row, run

RESULTS = Path(__file__).resolve().parent / "results"
ACCURACY = RESULTS / "accuracy"


class NotAvailableError(RuntimeError):
    """There is no figure; the message says why."""


class Measurements:
    """Measures a case when it is first asked for, at all thread counts at once, and remembers its rows.

    `cases` maps a title to a function that builds the case.
    """

    def __init__(
        self,
        cases: Mapping[str, Callable[[], Case]],
        threads: Sequence[int] = (1,),
        seconds: float = 2.0,
        accuracy: Path = ACCURACY,
    ) -> None:
        self.cases = cases
        self.threads = tuple(threads)
        self.seconds = seconds
        self.accuracy = accuracy
        self.rows: list[Row] = []
        self.ceilings: dict[int, Ceilings] = {}
        self._measured: set[str] = set()

    def row(self, title: str, variant: str, threads: int) -> Row:
        """The row of one variant; raises `NotAvailableError` if its check failed."""
        if title not in self._measured:
            update(self.ceilings, self.threads)
            self.rows += run([self.cases[title]()], self.threads, self.seconds)
            update(self.ceilings, self.threads)
            self._measured.add(title)
        for row in self.rows:
            if (f"{row.case} {row.size}", row.variant, row.threads) == (title, variant, threads):
                if row.status != "ok":
                    raise NotAvailableError(row.status)
                return row
        raise NotAvailableError(f"{title} was not measured for {variant} with {threads} threads")

    def results(self, **wanted: Any) -> list[Mapping[str, Any]]:
        """All results files (one per seed, say) with the wanted fields; `NotAvailableError` if there is none."""
        found = []
        for path in sorted(self.accuracy.glob("*.json")):
            content = json.loads(path.read_text())
            if all(content.get(key) == value for key, value in wanted.items()):
                if not content.get("commit"):
                    raise NotAvailableError(f"{path.name} does not say which commit it is from")
                found.append(content)
        if not found:
            raise NotAvailableError("not run")
        return found


class Figure(NamedTuple):
    """What a bar measures, and what there is to say about it."""

    value: float
    note: str = ""


Measure = Callable[[Measurements, int | None], Figure]


def speedup(title: str, variant: str = "fused") -> Measure:
    """How many times faster than the baseline, beside what the counted work takes at this machine's ceilings."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        row = measured.row(title, variant, threads)
        if row.speedup is None:
            raise NotAvailableError(f"{title}: the baseline was not timed")
        note, ceilings = f"{row.median * 1e3:.1f} ms", measured.ceilings[threads]
        if row.gflops and row.gbs and ceilings.fma and ceilings.read:
            share = row.gflops / ceilings.fma + row.gbs / ceilings.read
            note += f"; at the ceilings {row.median * share * 1e3:.1f} ms, {row.speedup / share:.1f}x"
        return Figure(row.speedup, note)

    return figure


def over(title: str, variant: str, other: str) -> Measure:
    """How many times faster one variant is than another that is not the baseline."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        mine, others = (measured.row(title, name, threads).median for name in (variant, other))
        return Figure(others / mine, f"{mine * 1e3:.1f} ms, {other} {others * 1e3:.1f} ms")

    return figure


def over_compiled(title: str) -> Measure:
    """How many times faster the fused model is than the reference under torch.compile."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        fused, compiled, eager = (measured.row(title, name, threads) for name in ("fused", "compile", "reference"))
        times = (
            f"{fused.median * 1e3:.1f} ms, compiled {compiled.median * 1e3:.1f} ms, eager {eager.median * 1e3:.1f} ms"
        )
        return Figure(compiled.median / fused.median, f"{times}, compilation {compiled.first:.0f} s")

    return figure


def share(title: str, ceiling: str, variant: str = "cpu") -> Measure:
    """Per cent of a ceiling, `fma`, `bf16_dot` or `read`, measured in the same run."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        row = measured.row(title, variant, threads)
        ceilings = measured.ceilings[threads]
        limit = getattr(ceilings, ceiling)
        if limit is None:
            raise NotAvailableError(f"ceilings not measured: {ceilings.reason}")
        if not limit:
            raise NotAvailableError("this CPU has no dot product of bfloat16 pairs")
        rate, unit = (row.gbs, "GB/s") if ceiling == "read" else (row.gflops, "GFLOP/s")
        return Figure(100 * rate / limit, f"{rate:.1f} of {limit:.1f} {unit}")

    return figure


def growth(few: int, many: int) -> Measure:
    """Seconds that a step costs more with many experts than with few, over the floor of that difference."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        less, more = (measured.row(f"growth K={few},{many}", f"fused K={k}", threads).median for k in (few, many))
        ceilings = measured.ceilings[threads]
        if ceilings.fma is None or ceilings.read is None:
            raise NotAvailableError(f"ceilings not measured: {ceilings.reason}")
        if more <= less:
            raise NotAvailableError(f"K={many} was measured to be no slower than K={few}: too much noise, try again")
        floor = model_cases.growth_floor(few, many).seconds(ceilings.fma, ceilings.read)
        return Figure((more - less) / floor, f"{1e3 * (more - less):.1f} ms, floor {1e3 * floor:.1f} ms")

    return figure


def temporaries(experts: int, batch: int) -> Measure:
    """Peak memory of routed inference above the weights, fused over reference."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        fused, reference = (
            memory.peak_temporaries("bench.model_cases:prepare_inference", kind=kind, experts=experts, batch=batch)
            for kind in ("fused", "reference")
        )
        return Figure(fused / reference, f"{fused / 2**20:.0f} of {reference / 2**20:.0f} MiB")

    return figure


def over_projection(measured: Measurements, threads: int | None) -> Figure:
    """Time of task_attention with 50 tokens over that of one projection of the patches to keys and values."""
    title = "task_attention T=50 over a projection"
    op, projection = (measured.row(title, variant, threads).median for variant in ("op", "projection"))
    return Figure(op / projection, f"{1e3 * op:.1f} ms, projection {1e3 * projection:.1f} ms")


def task_temporaries(measured: Measurements, threads: int | None) -> Figure:
    """Peak memory of task_attention with 50 tokens above its arguments, over that of the same projection."""
    op, projection = (
        memory.peak_temporaries("bench.task_cases:prepare", kind=kind, tokens=50) for kind in ("op", "projection")
    )
    return Figure(op / projection, f"{op / 2**20:.1f} of {projection / 2**20:.1f} MiB")


def per_task(measured: Measurements, threads: int | None) -> Figure:
    """Time that each task after the first adds to a forward pass of DyTox, in per cent of the pass with one."""
    few, many = (measured.row("dytox growth T=1,50", name, threads).median for name in ("T=1", "T=50"))
    return Figure(100 * (many / few - 1) / 49, f"{1e3 * few:.0f} ms with 1 task, {1e3 * many:.0f} ms with 50")


def training_minutes(**wanted: Any) -> Measure:
    """Of training, the slowest run's."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        slowest = max(measured.results(**wanted), key=lambda result: result["seconds"])
        return Figure(slowest["seconds"] / 60, f"commit {slowest['commit'][:12]}, {slowest['threads']} threads")

    return figure


def final_accuracy(**wanted: Any) -> Measure:
    """Per-sample accuracy at the end of the stream, in per cent; the mean over the runs (seeds)."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        found = measured.results(**wanted)
        commits = ", ".join(dict.fromkeys(result["commit"][:12] for result in found))
        mean = sum(result["final_accuracy"] for result in found) / len(found)
        return Figure(100 * mean, f"commit {commits}, {len(found)} run{'s' if len(found) > 1 else ''}")

    return figure


def most_experts(**wanted: Any) -> Measure:
    """At the end of the stream, the run's with most."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        return Figure(max(result["num_experts"] for result in measured.results(**wanted)))

    return figure


def detection(stream: str, column: str) -> Measure:
    """The number in a column of the detection report's row of `stream`, rule `calibrated`."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        path = RESULTS / "detection.csv"
        rows = list(csv.DictReader(path.open())) if path.exists() else []
        for row in rows:
            if (row["stream"], row["rule"]) == (stream, "calibrated"):
                return Figure(float(row[column].split()[0]), f"{row['seeds']} seeds, {row[column]}")
        raise NotAvailableError("not run")

    return figure
