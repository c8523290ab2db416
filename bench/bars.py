"""The bars that the issues set, as data; `python -m bench --bars` prints one line for each.

A speed is measured when its bar is asked for. An accuracy comes from `bench/results/accuracy/*.json`: the results.json
of a `levit train` run, which carries the commit that produced it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench import memory, model_cases
from bench.ceilings import Ceilings, update
from bench.harness import Case, Row, run

ACCURACY = Path(__file__).resolve().parent / "results" / "accuracy"
FULL_MNIST = 60_000


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


@dataclass(frozen=True)
class Bar:
    """One line: a figure with its limits, `low` ≤ figure ≤ `high`; None leaves that side open.

    `threads` is None where the figure does not depend on it. A bar with `judged=False` is reported only.
    """

    issue: str
    name: str
    figure: Measure
    low: float | None = None
    high: float | None = None
    unit: str = ""
    threads: int | None = None
    judged: bool = True

    @property
    def limit(self) -> str:
        """As text."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}{self.unit}"
        return f">= {self.low:g}{self.unit}" if self.high is None else f"<= {self.high:g}{self.unit}"

    def holds(self, figure: float) -> bool:
        """Whether the figure is within the limits; NaN is not."""
        return (self.low is None or figure >= self.low) and (self.high is None or figure <= self.high)


Measure = Callable[[Measurements, int | None], Figure]


@dataclass(frozen=True)
class Verdict:
    """What became of a bar: `ok`, `short` or `reported`; without a figure the note is the reason."""

    bar: Bar
    state: str
    figure: float | None = None
    note: str = ""

    def __str__(self) -> str:
        bar = self.bar
        figure = "-" if self.figure is None else f"{self.figure:.2f}{bar.unit}"
        threads = "" if bar.threads is None else f"{bar.threads} thread{'s' if bar.threads > 1 else ''}"
        text = f"{self.state:<9}{bar.issue:<3}{bar.name:<54} {figure:>10}  {bar.limit:<12} {threads:<10} {self.note}"
        return text.rstrip()


def judge(bar: Bar, measurements: Measurements) -> Verdict:
    """Get the figure and compare it; whatever keeps a figure from being measured makes its bar short."""
    missed = "short" if bar.judged else "reported"
    try:
        value, note = bar.figure(measurements, bar.threads)
    except Exception as error:  # one broken case must not hide the other bars
        reason = str(error) if isinstance(error, NotAvailableError) else f"{type(error).__name__}: {error}"
        return Verdict(bar, missed, note=" ".join(reason.split()))
    return Verdict(bar, ("ok" if bar.holds(value) else "short") if bar.judged else "reported", value, note)


def _speedup(title: str, variant: str = "fused") -> Measure:
    def figure(measured: Measurements, threads: int | None) -> Figure:
        row = measured.row(title, variant, threads)
        if row.speedup is None:
            raise NotAvailableError(f"{title}: the baseline was not timed")
        return Figure(row.speedup, f"{row.median * 1e3:.1f} ms")

    return figure


def _over(title: str, variant: str, other: str) -> Measure:
    """How many times faster one variant is than another that is not the baseline."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        mine, others = (measured.row(title, name, threads).median for name in (variant, other))
        return Figure(others / mine, f"{mine * 1e3:.1f} ms, {other} {others * 1e3:.1f} ms")

    return figure


def _share(title: str, ceiling: str, variant: str = "cpu") -> Measure:
    """Per cent of a ceiling, `fma` or `read`, measured in the same run."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        row = measured.row(title, variant, threads)
        ceilings = measured.ceilings[threads]
        limit = getattr(ceilings, ceiling)
        if limit is None:
            raise NotAvailableError(f"ceilings not measured: {ceilings.reason}")
        rate, unit = (row.gflops, "GFLOP/s") if ceiling == "fma" else (row.gbs, "GB/s")
        return Figure(100 * rate / limit, f"{rate:.1f} of {limit:.1f} {unit}")

    return figure


def _growth(few: int, many: int) -> Measure:
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


def _temporaries(experts: int, batch: int) -> Measure:
    """Peak memory of routed inference above the weights, fused over reference."""

    def figure(measured: Measurements, threads: int | None) -> Figure:
        fused, reference = (
            memory.peak_temporaries("bench.model_cases:prepare_inference", kind=kind, experts=experts, batch=batch)
            for kind in ("fused", "reference")
        )
        return Figure(fused / reference, f"{fused / 2**20:.0f} of {reference / 2**20:.0f} MiB")

    return figure


def _over_projection(measured: Measurements, threads: int | None) -> Figure:
    """Time of task_attention with 50 tokens over that of one projection of the patches to keys and values."""
    title = "task_attention T=50 over a projection"
    op, projection = (measured.row(title, variant, threads).median for variant in ("op", "projection"))
    return Figure(op / projection, f"{1e3 * op:.1f} ms, projection {1e3 * projection:.1f} ms")


def _task_temporaries(measured: Measurements, threads: int | None) -> Figure:
    """Peak memory of task_attention with 50 tokens above its arguments, over that of the same projection."""
    op, projection = (
        memory.peak_temporaries("bench.task_cases:prepare", kind=kind, tokens=50) for kind in ("op", "projection")
    )
    return Figure(op / projection, f"{op / 2**20:.1f} of {projection / 2**20:.1f} MiB")


def _per_task(measured: Measurements, threads: int | None) -> Figure:
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


def _one_and_two(issue: str, name: str, figure: Measure, **limits: Any) -> list[Bar]:
    """Judged with one thread, reported with two."""
    return [Bar(issue, name, figure, **limits, threads=t, judged=t == 1) for t in (1, 2)]


def _each(issue: str, name: str, figure: Measure, unit: str, *lows: float) -> list[Bar]:
    """A bar for every thread count, one, two, ...: at least `lows`."""
    return [Bar(issue, name, figure, low=low, unit=unit, threads=t) for t, low in enumerate(lows, start=1)]


_ATTENTION, _COLD = "expert_attention K=32 B=64", "expert_attention K=32 B=1 cold"

BARS: tuple[Bar, ...] = (
    Bar(
        "A",
        "split-mnist, full stream, training time",
        training_minutes(preset="split-mnist", method="levit", images=FULL_MNIST),
        high=45,
        unit=" min",
    ),
    Bar(
        "A",
        "split-mnist, finetune, final accuracy per sample",
        final_accuracy(preset="split-mnist", method="finetune", images=FULL_MNIST),
        low=15,
        high=25,
        unit=" %",
    ),
    *_one_and_two("B", "Algorithm 1 step, K=5, over the reference", _speedup("step K=5"), low=2, unit="x"),
    *_one_and_two("B", "Algorithm 1 step, K=8, over the reference", _speedup("step K=8"), low=2.8, unit="x"),
    *_one_and_two("B", "Algorithm 1 step, K=32, over the reference", _speedup("step K=32"), low=7.5, unit="x"),
    *_one_and_two("B", "Algorithm 1 step, growth from K=2 to 64, over its floor", _growth(2, 64), high=1.5, unit="x"),
    *_one_and_two("B", "routed inference, K=32, 256 images", _speedup("inference K=32 B=256"), low=3, unit="x"),
    *_one_and_two("B", "routed inference, K=32, 1 image", _speedup("inference K=32 B=1"), low=3, unit="x"),
    Bar("B", "routed inference, K=64, 256 images, temporaries", _temporaries(64, 256), high=0.25, unit="x"),
    *_each("E", "expert_attention, K=32 B=64, of the FMA peak", _share(_ATTENTION, "fma"), " %", 85, 80),
    *_each("E", "expert_attention, K=32 B=1 cold, of the FMA peak", _share(_COLD, "fma"), " %", 50),
    *_each("E", "expert_attention, K=32 B=64, over the eager loop", _over(_ATTENTION, "cpu", "loop"), "x", 3, 3),
    *_each("E", "expert_attention, K=32 B=64, over torch backend", _over(_ATTENTION, "cpu", "torch"), "x", 1.3, 1.3),
    *_each("E", "dkf_fuse, K=8, of the read bandwidth", _share("dkf_fuse K=8 B=64", "read"), " %", 65, 85),
    *_each("E", "dkf_fuse, K=31, of the read bandwidth", _share("dkf_fuse K=31 B=64", "read"), " %", 65, 85),
    *_each("E", "Algorithm 1 step, K=5, over the reference", _speedup("step K=5"), "x", 3.5, 3),
    *_each("E", "Algorithm 1 step, K=8, over the reference", _speedup("step K=8"), "x", 5, 3.6),
    *_each("E", "Algorithm 1 step, K=32, over the reference", _speedup("step K=32"), "x", 13, 10),
    *_each("E", "routed inference, K=32, 256 images, all to last", _speedup("inference K=32 B=256 last"), "x", 5.5, 5),
    *_each("E", "routed inference, K=32, 256 images, uniform", _speedup("inference K=32 B=256"), "x", 7.5, 7),
    *_each("E", "routed inference, K=32, 1 image", _speedup("inference K=32 B=1"), "x", 5),
    *_one_and_two(
        "H",
        "task_attention, 50 tokens, over separate passes",
        _speedup("task_attention T=50 B=32", "op"),
        low=20,
        unit="x",
    ),
    *_one_and_two(
        "H",
        "task_attention, 50 tokens, forward and backward",
        _speedup("task_attention T=50 B=32 fwd+bwd", "op"),
        low=10,
        unit="x",
    ),
    *_one_and_two("H", "task_attention, 50 tokens, over a K and V projection", _over_projection, high=1.8, unit="x"),
    Bar("H", "task_attention, 50 tokens, temporaries over the same", _task_temporaries, high=1.5, unit="x"),
    *_one_and_two(
        "H", "DyTox forward, 50 tasks, over separate passes", _speedup("dytox T=50 B=32", "joint"), low=2, unit="x"
    ),
    *_one_and_two("H", "DyTox forward, each further task", _per_task, high=0.8, unit=" %"),
)
