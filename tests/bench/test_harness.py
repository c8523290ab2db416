"""The harness on toy cases whose answer is known: what is timed, what is not, and what the numbers are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import ceilings as ceilings_module
from bench import harness, measures, memory, report
from bench.__main__ import bars
from bench.bars import Bar, judge
from bench.cases import CASES, select
from bench.ceilings import Ceilings
from bench.harness import Case, Row, interleave, run, shares, thread_count
from bench.measures import Figure, Measurements, NotAvailableError, final_accuracy, training_minutes


class FakeMachine:
    """A clock that only work moves; `slowness` is what a neighbour does to all work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slowness = 1.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def work(self, name: str, seconds: float, slow_after: int | None = None) -> Callable[[], float]:
        def call() -> float:
            self.calls.append(name)
            if slow_after is not None and len(self.calls) > slow_after:
                self.slowness = 10.0
            self.now += seconds * self.slowness
            return 1.0

        return call


def counted(value: object, calls: list[object]) -> Callable[[], object]:
    def call() -> object:
        calls.append(value)
        return value

    return call


def toy(**changes: object) -> Case:
    fields = dict(name="toy", size="n=1", variants={"slow": lambda: 1.0, "fast": lambda: 1.0}, baseline="slow")
    return Case(**(fields | changes))


@pytest.fixture
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing finds what the names say, not what the machine does."""
    seconds = {"slow": [4.0, 6.0, 8.0, 1.0, 5.0], "fast": [2.0, 2.5, 9.0, 1.0, 3.0]}
    monkeypatch.setattr(harness, "interleave", lambda variants, *_: {name: seconds[name] for name in variants})


def test_wrong_variant_is_called_once_and_never_timed() -> None:
    right, wrong = [], []
    case = toy(variants={"slow": counted(1.0, right), "fast": counted(2.0, wrong)})
    slow, fast = run([case], seconds=0.0, min_rounds=3)
    assert (slow.status, slow.rounds, len(right)) == ("ok", 3, 1 + 1 + 3)
    assert fast.status.startswith("check failed: AssertionError") and len(wrong) == 1
    assert (fast.median, fast.speedup, fast.gflops, fast.rounds) == (None, None, None, 0)


def test_variant_that_raises_is_reported_and_the_others_go_on() -> None:
    def broken() -> float:
        raise MemoryError("no room\nfor 3 GB")

    rows = run([toy(variants={"slow": lambda: 1.0, "fast": broken})], seconds=0.0)
    assert [row.status for row in rows] == ["ok", "check failed: MemoryError: no room for 3 GB"]


def test_nothing_is_timed_against_a_broken_baseline() -> None:
    def broken() -> float:
        raise ValueError("bad")

    slow, fast = run([toy(variants={"slow": broken, "fast": lambda: 1.0})], seconds=0.0)
    assert slow.status == "check failed: ValueError: bad"
    assert fast.status == "not checked: the baseline failed" and fast.median is None


def test_expected_judges_the_baseline_too() -> None:
    variants = {"slow": lambda: 1.0, "fast": lambda: 2.0}
    slow, fast = run([toy(variants=variants, expected=lambda name: 2.0)], seconds=0.0)
    assert slow.status.startswith("check failed") and fast.status == "ok"
    assert fast.speedup is None


def test_check_runs_at_every_thread_count_before_any_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    monkeypatch.setattr(
        harness, "interleave", lambda variants, *_: events.append("time") or {n: [1.0] for n in variants}
    )
    before = torch.get_num_threads()
    case = toy(variants={"slow": lambda: events.append(torch.get_num_threads())}, check=lambda *_: None)
    rows = run([case], threads=(1, 2))
    assert events == [1, 2, "time", "time"]
    assert [row.threads for row in rows] == [1, 2]
    assert torch.get_num_threads() == before


def test_thread_count_is_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), thread_count(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_interleaving_takes_turns_and_rotates_the_start() -> None:
    machine = FakeMachine()
    variants = {name: machine.work(name, 1.0) for name in "abc"}
    interleave(variants, seconds=0.0, min_rounds=4, clock=machine.clock)
    warm_up, rounds = machine.calls[:3], ["".join(machine.calls[i : i + 3]) for i in range(3, 15, 3)]
    assert warm_up == ["a", "b", "c"]
    assert rounds == ["abc", "bca", "cab", "abc"]


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    machine = FakeMachine()
    variants = {"slow": machine.work("slow", 3.0, slow_after=12), "fast": machine.work("fast", 1.0)}
    times = interleave(variants, seconds=0.0, min_rounds=20, clock=machine.clock)
    ratio = sorted(times["slow"])[10] / sorted(times["fast"])[10]
    assert max(times["fast"]) == pytest.approx(10.0) and min(times["fast"]) == pytest.approx(1.0)
    assert ratio == pytest.approx(3.0)


def test_budget_and_minimum_of_rounds() -> None:
    machine = FakeMachine()
    times = interleave({"a": machine.work("a", 1.0)}, seconds=7.5, min_rounds=2, clock=machine.clock)
    assert len(times["a"]) == 8
    times = interleave({"a": machine.work("a", 100.0)}, seconds=7.5, min_rounds=3, clock=machine.clock)
    assert len(times["a"]) == 3


@pytest.mark.usefixtures("fixed_times")
def test_figures_are_medians_and_speedups_over_the_named_baseline() -> None:
    limits = Ceilings(threads=1, gemm=50.0, fma=100.0, bf16_dot=0.0, read=10.0)
    slow, fast = shares(run([toy(flops=200e9, bytes={"fast": 5e9})]), {1: limits})
    assert (slow.median, fast.median) == (5.0, 2.5)
    assert (slow.p20, slow.p80) == pytest.approx((3.4, 6.4))
    assert (slow.speedup, fast.speedup) == (1.0, 2.0)
    assert (slow.gflops, fast.gflops) == pytest.approx((40.0, 80.0))
    assert (slow.gbs, fast.gbs) == (None, pytest.approx(2.0))
    assert (fast.fma_share, fast.read_share) == pytest.approx((0.8, 0.2))
    (other_way, _) = run([toy(baseline="fast")])
    assert other_way.speedup == pytest.approx(0.5)
    assert other_way.fma_share is None


@pytest.mark.usefixtures("fixed_times")
def test_times_are_per_work_where_a_call_does_several() -> None:
    slow, _ = run([toy(calls=5, flops=10e9)])
    assert (slow.median, slow.gflops) == pytest.approx((1.0, 10.0))


def test_cases_are_built_one_at_a_time() -> None:
    alive = []

    def builder() -> object:
        for name in ("first", "second"):
            alive.append(name)
            yield toy(name=name, variants={"slow": lambda: 1.0})

    seen = run(builder(), seconds=0.0, min_rounds=1)
    assert [row.case for row in seen] == alive == ["first", "second"]


@pytest.mark.parametrize("changes", [dict(baseline="none"), dict(calls=0)])
def test_case_refuses_nonsense(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        toy(**changes)


ROWS = [
    Row("toy", "n=1", "slow", "slow", 1, "ok", 5, 5.0, 3.4, 6.4, 1.0, 40.0, None, 0.4, None),
    Row("toy", "n=1", "fast", "slow", 1, "check failed: AssertionError: off by one"),
]
LIMITS = {1: Ceilings(1, 50.0, 100.0, 0.0, 10.0), 2: Ceilings(2, None, reason="no compiler")}


def test_table_is_plain_text_off_a_terminal() -> None:
    out = io.StringIO()
    report.table(ROWS, LIMITS, file=out)
    text = out.getvalue()
    assert text.isascii() and "\x1b" not in text
    slow, fast = (line for line in text.splitlines() if "| toy" in line)
    assert [cell.strip() for cell in slow.strip("|").split("|")] == [
        *("toy", "n=1", "slow", "1", "5000.000", "3400.000", "6400.000", "5", "1.00x", "40.0", "-", "40", "-", "ok")
    ]
    assert "off by one" in fast
    assert "FMA loop 100.0 GFLOP/s, bf16 dot absent, oneDNN GEMM 50.0 GFLOP/s, read stream 10.0 GB/s" in text
    assert "FMA loop not measured" in text and "no compiler" in text


def test_json_and_csv_hold_every_row_and_say_where_they_come_from(tmp_path: Path) -> None:
    json_path, csv_path = report.save(ROWS, LIMITS, tmp_path / "new" / "folder")
    document = json.loads(json_path.read_text())
    assert [Row(**row) for row in document["rows"]] == ROWS
    assert [Ceilings(**figures) for figures in document["ceilings"]] == list(LIMITS.values())
    assert document["torch"] == torch.__version__ and document["threads"] == [1]
    assert all(document[key] for key in ("commit", "date", "cpu", "cores", "python"))
    slow, fast = csv.DictReader(csv_path.read_text().splitlines())
    assert (slow["variant"], float(slow["median"]), slow["gbs"]) == ("slow", 5.0, "")
    assert (fast["status"], fast["commit"]) == (ROWS[1].status, document["commit"])


def test_interrupted_save_keeps_the_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = report.save(ROWS, LIMITS, tmp_path)
    before = [path.read_text() for path in paths]
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.save(ROWS[:1], LIMITS, tmp_path)
    assert [path.read_text() for path in paths] == before
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def measurements(accuracy: Path, threads: tuple[int, ...] = (1,)) -> Measurements:
    return Measurements({"toy n=1": toy}, threads, seconds=0.0, accuracy=accuracy)


def bar(figure: float | Exception, **fields: object) -> Bar:
    def yields(measured: Measurements, threads: int | None) -> Figure:
        if isinstance(figure, Exception):
            raise figure
        return Figure(figure)

    return Bar(**(dict(issue="T", name="toy", figure=yields, low=2.0, unit="x") | fields))


@pytest.mark.parametrize(
    ("one", "exit_code", "line"),
    [
        (bar(2.0), 0, "ok       T  toy"),
        (bar(1.99), 1, "short    T  toy"),
        (bar(float("nan")), 1, "short    T  toy"),
        (bar(0.3, low=None, high=0.25), 1, "short    T  toy"),
        (bar(20.0, low=15, high=25, unit=" %"), 0, "15 to 25 %"),
        (bar(26.0, low=15, high=25, unit=" %"), 1, "short    T  toy"),
        (bar(1.0, judged=False, threads=1), 0, "reported T  toy"),
        (bar(NotAvailableError("not run")), 1, "not run"),
        (bar(ZeroDivisionError("by zero")), 1, "ZeroDivisionError: by zero"),
    ],
)
def test_a_bar_decides_the_exit_code(
    one: Bar, exit_code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bars([one], [], measurements(tmp_path), tmp_path) == exit_code
    assert line in capsys.readouterr().out


def test_every_bar_is_judged_even_after_a_short_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [bar(RuntimeError("broken")), bar(3.0), bar(3.0, threads=2), bar(9.0, name="other")]
    assert bars(chosen, ["TOY"], measurements(tmp_path), tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["short", "ok"]


def speedup(measured: Measurements, threads: int | None) -> Figure:
    return Figure(measured.row("toy n=1", "fast", threads).speedup)


@pytest.mark.usefixtures("fixed_times")
def test_a_speed_is_measured_once_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "measure", lambda threads, seconds: Ceilings(threads, 1.0))
    measured = measurements(tmp_path / "accuracy", threads=(1, 2))
    speeds = [Bar("T", "toy", speedup, low=2.0, threads=count) for count in (1, 2)]
    assert bars(speeds, [], measured, tmp_path) == 0
    assert len(measured.rows) == 4
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 4


@pytest.mark.usefixtures("fixed_times")
def test_a_speed_stands_beside_what_its_work_takes_at_the_ceilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Ceilings(1, 1.0, fma=10.0, read=5.0)
    monkeypatch.setattr(ceilings_module, "measure", lambda threads, seconds: known)
    measured = Measurements({"toy n=1": lambda: toy(flops=2e9, bytes=1e9)}, (1,), seconds=0.0, accuracy=tmp_path)
    verdict = judge(Bar("T", "toy", measures.speedup("toy n=1", "fast"), low=0.0, threads=1), measured)
    slow = measured.row("toy n=1", "slow", 1).median
    assert verdict.note.endswith(f"; at the ceilings 400.0 ms, {slow / 0.4:.1f}x")  # 2 of 10 and 1 of 5 Giga a second


def test_a_failed_check_makes_its_bar_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "measure", lambda threads, seconds: Ceilings(threads, 1.0))
    wrong = toy(variants={"slow": lambda: 1.0, "fast": lambda: 2.0})
    measured = Measurements({"toy n=1": lambda: wrong}, (1,), seconds=0.0, accuracy=tmp_path)
    verdict = judge(Bar("T", "toy", speedup, low=1.0, threads=1), measured)
    assert verdict.state == "short" and "check failed" in str(verdict)


def test_accuracies_come_from_files_that_name_their_commit(tmp_path: Path) -> None:
    def record(name: str, **fields: object) -> None:
        (tmp_path / name).write_text(json.dumps(dict(preset="digits", images=60, threads=2) | fields))

    wanted = dict(preset="digits", method="levit")
    minutes = Bar("T", "toy", training_minutes(**wanted), high=2.0, unit=" min")
    accuracy = Bar("T", "toy", final_accuracy(**wanted), low=80.0)
    assert judge(accuracy, measurements(tmp_path)).note == "not run"
    record("a.json", method="levit", commit="abc", seconds=60, final_accuracy=0.8)
    record("b.json", method="levit", commit="def", seconds=90, final_accuracy=0.9)
    record("c.json", method="finetune", commit="abc", seconds=600, final_accuracy=0.1)
    verdict = judge(accuracy, measurements(tmp_path))
    assert (verdict.state, verdict.figure) == ("ok", pytest.approx(85.0))
    assert verdict.note == "commit abc, def, 2 runs"
    slowest = judge(minutes, measurements(tmp_path))
    assert (slowest.figure, slowest.note) == (1.5, "commit def, 2 threads")
    record("d.json", method="levit", commit=None, seconds=30, final_accuracy=1.0)
    verdict = judge(accuracy, measurements(tmp_path))
    assert (verdict.state, verdict.note) == ("short", "d.json does not say which commit it is from")


def test_ceilings_say_why_they_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "_native_ops", lambda: (None, "FMA loop and read stream: no compiler"))
    figures = ceilings_module.measure(threads=1, seconds=0.02)
    assert figures.fma is figures.read is figures.bf16_dot is None
    assert figures.gemm > 0
    assert "FMA loop not measured" in str(figures) and "no compiler" in str(figures)


def test_ceilings_of_this_machine() -> None:
    figures = ceilings_module.measure(threads=1, seconds=0.1)
    if figures.fma is None:
        assert figures.reason
    else:
        assert figures.reason == ""
        assert 0.1 < figures.fma < 1e4 and 0.1 < figures.read < 1e4
        assert figures.bf16_dot == 0 or figures.bf16_dot > 0.5 * figures.fma


def test_a_ceiling_keeps_the_better_of_two_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([Ceilings(2, gemm=5.0, fma=9.0, bf16_dot=0.0, read=1.0), Ceilings(2, 6.0, 8.0, 0.0, 20.0)])
    monkeypatch.setattr(ceilings_module, "measure", lambda threads, seconds: next(measured))
    best: dict[int, Ceilings] = {}
    ceilings_module.update(best, [2])
    ceilings_module.update(best, [2])
    assert best == {2: Ceilings(2, gemm=6.0, fma=9.0, bf16_dot=0.0, read=20.0)}
    without = Ceilings(2, None, reason="no compiler")
    assert without.better(without) == without


def test_the_best_repetition_is_the_ceiling() -> None:
    rates = iter([3.0, 9.0, 5.0])
    assert ceilings_module._best(lambda: next(rates), seconds=0.0) == 9.0


TARGET = """
import torch

def prepare(mebibytes):
    kept = [torch.ones(64 << 18)]

    def small_blocks():
        return [torch.ones(16 << 10) for _ in range(16 * mebibytes)]

    def warm_up():
        kept.append(small_blocks()[-1])  # the last one keeps the heap from shrinking by itself

    def work():
        torch.ones(2 * mebibytes << 18)
        large, blocks = torch.ones(2 * mebibytes << 18), small_blocks()

    return warm_up, work
"""


def test_peak_memory_counts_the_largest_moment_of_the_work_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_target.py").write_text(TARGET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mebibytes = memory.peak_temporaries("toy_target:prepare", mebibytes=20) / 2**20
    assert mebibytes == pytest.approx(2 * 20 + 20, abs=1.5)


def test_peak_memory_tells_why_it_failed() -> None:
    with pytest.raises(RuntimeError, match="no_such_module:prepare: ModuleNotFoundError: No module named"):
        memory.peak_temporaries("no_such_module:prepare")


def test_cases_are_chosen_by_a_part_of_their_title() -> None:
    assert list(select(["STEP k=5"])) == ["step K=5"]
    assert list(select()) == list(CASES)
    with pytest.raises(ValueError, match="got 'nonsense'"):
        select(["step", "nonsense"])
