"""`pytest bench --benchmark-only`: pytest-benchmark's table of every variant, then our table of the interleaved run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench import report
from bench.cases import CASES
from bench.ceilings import Ceilings, measure
from bench.harness import Case, Row, run, thread_count

SECONDS = 1.5
THREADS = 1

ROWS = pytest.StashKey[list[Row]]()
CEILINGS = pytest.StashKey[dict[int, Ceilings]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def ceilings(pytestconfig: pytest.Config) -> dict[int, Ceilings]:
    """Of this machine, measured before the first case."""
    pytestconfig.stash[CEILINGS] = {THREADS: measure(THREADS)}
    return pytestconfig.stash[CEILINGS]


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, ceilings: dict[int, Ceilings]
) -> Iterator[tuple[Case, dict[str, Row]]]:
    """The case with the title that is the parameter, checked and timed by our harness, and its rows by variant."""
    built = CASES[request.param]()
    rows = run([built], THREADS, SECONDS, ceilings)
    pytestconfig.stash[ROWS] += rows
    yield built, {row.variant: row for row in rows}


@pytest.fixture
def time_variant(case: tuple[Case, dict[str, Row]], benchmark: object) -> object:
    """A function that hands one variant of the case to pytest-benchmark, unless its check failed."""

    def time(variant: str) -> None:
        built, rows = case
        if variant not in rows:
            pytest.skip(f"{variant} cannot run here")
        assert rows[variant].status == "ok", f"{variant}: {rows[variant].status}"
        benchmark.group = f"{built.name} {built.size}"
        rounds = max(3, min(200, round(SECONDS / 3 / rows[variant].median / built.calls)))
        with thread_count(THREADS):
            benchmark.pedantic(built.variants[variant], rounds=rounds, warmup_rounds=1)

    return time


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[ROWS]:
        figures = config.stash[CEILINGS]
        terminalreporter.section("interleaved, checked first")
        report.table(rows, figures, file=sys.stdout)
        for path in report.save(rows, figures):
            terminalreporter.write_line(str(path))
