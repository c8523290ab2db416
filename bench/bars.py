"""The bars that the issues set, as data; `python -m bench --bars` prints one line for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.measures import (
    Measure,
    Measurements,
    NotAvailableError,
    detection,
    final_accuracy,
    growth,
    most_experts,
    over,
    over_compiled,
    over_projection,
    per_task,
    share,
    speedup,
    task_temporaries,
    temporaries,
    training_minutes,
)

FULL_MNIST, FULL_CIFAR = 60_000, 50_000


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


def _one_and_two(issue: str, name: str, figure: Measure, **limits: Any) -> list[Bar]:
    """Judged with one thread, reported with two."""
    return [Bar(issue, name, figure, **limits, threads=t, judged=t == 1) for t in (1, 2)]


def _each(issue: str, name: str, figure: Measure, unit: str, *lows: float) -> list[Bar]:
    """A bar for every thread count, one, two, ...: at least `lows`."""
    return [Bar(issue, name, figure, low=low, unit=unit, threads=t) for t, low in enumerate(lows, start=1)]


_MNIST = dict(preset="split-mnist", method="levit", images=FULL_MNIST)
_FASHION = dict(preset="split-fashion", method="levit", images=FULL_MNIST)
_PERMUTED = dict(preset="permuted-mnist", method="levit", images=FULL_MNIST)
_CIFAR = dict(preset="split-cifar10", method="levit", images=FULL_CIFAR)
_NO_CHANGE = [("split-mnist-shuffled", "missed"), ("split-mnist-shuffled", "delay (images)")]
_ATTENTION, _COLD = "expert_attention K=32 B=64", "expert_attention K=32 B=1 cold"
_HALF = "expert_attention K=32 B=64 bf16"

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
    *_one_and_two("B", "Algorithm 1 step, K=5, over the reference", speedup("step K=5"), low=2, unit="x"),
    *_one_and_two("B", "Algorithm 1 step, K=8, over the reference", speedup("step K=8"), low=2.8, unit="x"),
    *_one_and_two("B", "Algorithm 1 step, K=32, over the reference", speedup("step K=32"), low=7.5, unit="x"),
    *_one_and_two("B", "Algorithm 1 step, growth from K=2 to 64, over its floor", growth(2, 64), high=1.5, unit="x"),
    *_one_and_two("B", "routed inference, K=32, 256 images", speedup("inference K=32 B=256"), low=3, unit="x"),
    *_one_and_two("B", "routed inference, K=32, 1 image", speedup("inference K=32 B=1"), low=3, unit="x"),
    Bar("B", "routed inference, K=64, 256 images, temporaries", temporaries(64, 256), high=0.25, unit="x"),
    Bar("C", "split-mnist, final accuracy per sample", final_accuracy(**_MNIST), low=97.5, unit=" %"),
    Bar("C", "split-mnist, experts", most_experts(**_MNIST), high=6),
    Bar("C", "split-fashion, final accuracy per sample", final_accuracy(**_FASHION), low=85, unit=" %"),
    Bar("C", "permuted-mnist, final accuracy", final_accuracy(**_PERMUTED), low=83.56, unit=" %", judged=False),
    Bar("C", "split-cifar10, final accuracy per sample", final_accuracy(**_CIFAR), low=55, unit=" %"),
    Bar("C", "split-cifar10, training time", training_minutes(**_CIFAR), high=60, unit=" min"),
    *(
        Bar("C", f"{stream}, {column}", detection(stream, column), high=high)
        for stream in ("split-mnist", "split-fashion", "permuted-mnist", "split-mnist-fashion", "split-mnist-shuffled")
        for column, high in (("missed", 0), ("false alarms", 0), ("delay (images)", 100))
        if (stream, column) not in _NO_CHANGE
    ),
    *_each("E", "expert_attention, K=32 B=64, of the FMA peak", share(_ATTENTION, "fma"), " %", 85, 80),
    *_each("E", "expert_attention, K=32 B=64, of the bf16 peak", share(_HALF, "bf16_dot"), " %", 85, 80),
    *_each("E", "expert_attention, K=32 B=1 cold, of the FMA peak", share(_COLD, "fma"), " %", 50),
    *_each("E", "expert_attention, K=32 B=64, over the eager loop", over(_ATTENTION, "cpu", "loop"), "x", 3, 3),
    *_each("E", "expert_attention, K=32 B=64, over torch backend", over(_ATTENTION, "cpu", "torch"), "x", 1.3, 1.3),
    *_each("E", "expert_attention, bf16, over the eager fp32 loop", over(_HALF, "cpu", "loop"), "x", 6),
    *_each("E", "dkf_fuse, K=8, of the read bandwidth", share("dkf_fuse K=8 B=64", "read"), " %", 65, 85),
    *_each("E", "dkf_fuse, K=31, of the read bandwidth", share("dkf_fuse K=31 B=64", "read"), " %", 65, 85),
    *_each("E", "Algorithm 1 step, K=5, over the reference", speedup("step K=5"), "x", 3.5, 3),
    *_each("E", "Algorithm 1 step, K=8, over the reference", speedup("step K=8"), "x", 5, 3.6),
    *_each("E", "Algorithm 1 step, K=32, over the reference", speedup("step K=32"), "x", 13, 10),
    *_each("E", "Algorithm 1 step in bf16, K=5, over the reference", speedup("step K=5 bf16"), "x", 5),
    *_each("E", "Algorithm 1 step in bf16, K=8, over the reference", speedup("step K=8 bf16"), "x", 7),
    *_each("E", "Algorithm 1 step in bf16, K=32, over the reference", speedup("step K=32 bf16"), "x", 16),
    *_each("E", "routed inference, K=32, 256 images, all to last", speedup("inference K=32 B=256 last"), "x", 5.5, 5),
    *_each("E", "routed inference, K=32, 256 images, uniform", speedup("inference K=32 B=256"), "x", 7.5, 7),
    *_each("E", "the same in bf16, all to last", speedup("inference K=32 B=256 last bf16"), "x", 10),
    *_each("E", "the same in bf16, uniform", speedup("inference K=32 B=256 bf16"), "x", 12),
    *_each("E", "routed inference, K=32, 1 image", speedup("inference K=32 B=1"), "x", 5),
    *_each("E", "Algorithm 1 step, K=8, over torch.compile", over_compiled("compiled step K=8"), "x", 1),
    *_each("E", "routed inference, K=8, over torch.compile", over_compiled("compiled inference K=8 B=256"), "x", 1),
    *_each("E", "routed inference, K=32, over torch.compile", over_compiled("compiled inference K=32 B=256"), "x", 1),
    *_one_and_two(
        "H",
        "task_attention, 50 tokens, over separate passes",
        speedup("task_attention T=50 B=32", "op"),
        low=20,
        unit="x",
    ),
    *_one_and_two(
        "H",
        "task_attention, 50 tokens, forward and backward",
        speedup("task_attention T=50 B=32 fwd+bwd", "op"),
        low=10,
        unit="x",
    ),
    *_one_and_two("H", "task_attention, 50 tokens, over a K and V projection", over_projection, high=1.8, unit="x"),
    Bar("H", "task_attention, 50 tokens, temporaries over the same", task_temporaries, high=1.5, unit="x"),
    *_one_and_two(
        "H", "DyTox forward, 50 tasks, over separate passes", speedup("dytox T=50 B=32", "joint"), low=2, unit="x"
    ),
    *_one_and_two("H", "DyTox forward, each further task", per_task, high=0.8, unit=" %"),
)
