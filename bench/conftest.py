"""`pytest bench --benchmark-only`: pytest-benchmark's table of every variant, then our table of the interleaved run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench import report
from bench.cases import CASES
from bench.ceilings import Ceilings, update
from bench.harness import Case, Row, run, shares, thread_count

SECONDS = 1.5
THREADS = 1

ROWS = pytest.StashKey[list[Row]]()
CEILINGS = pytest.StashKey[dict[int, Ceilings]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    config.stash[CEILINGS] = {}


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[tuple[Case, dict[str, Row]]]:
    """The case with the title that is the parameter, checked and timed by our harness, and its rows by variant."""
    built = CASES[request.param]()
    update(pytestconfig.stash[CEILINGS], [THREADS])
    rows = run([built], THREADS, SECONDS)
    pytestconfig.stash[ROWS] += rows
    yield built, {row.variant: row for row in rows}


@pytest.fixture
def time_variant(case: tuple[Case, dict[str, Row]], benchmark: object) -> object:
    """A function that hands one variant of the case to pytest-benchmark, unless its check failed."""

    def time(variant: str) -> None:
        built, rows = case
        if variant not in rows:
            pytest.skip(built.absent[variant])
        assert rows[variant].status == "ok", f"{variant}: {rows[variant].status}"
        benchmark.group = f"{built.name} {built.size}"
        rounds = max(3, min(200, round(SECONDS / 3 / rows[variant].median / built.calls)))
        with thread_count(THREADS):
            benchmark.pedantic(built.variants[variant], rounds=rounds, warmup_rounds=1)

    return time


@pytest.hookimpl(trylast=True)  # our table comes after pytest-benchmark's
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[ROWS]:
        figures = config.stash[CEILINGS]
        update(figures, [THREADS])
        rows = shares(rows, figures)
        terminalreporter.section("interleaved, checked first")
        report.table(rows, figures, file=sys.stdout)
        for path in report.save(rows, figures):
            terminalreporter.write_line(str(path))
