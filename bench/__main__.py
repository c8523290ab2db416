"""`python -m bench`: check and time every case, print one table. `--bars`: one line for every bar that an issue set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import report
from bench.bars import BARS, Bar, judge
from bench.cases import CASES, SLOW, select
from bench.ceilings import Ceilings, update
from bench.harness import Case, run, shares
from bench.measures import Measurements


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a check failed or a bar is short, 2 for a wrong command line, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="cases (or bars) whose name contains NAME"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="thread counts (1 2)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="per case and thread count (2)")
    parser.add_argument(
        "--out", type=Path, default=report.LATEST, metavar="DIR", help="where bench.json and bench.csv go"
    )
    parser.add_argument("--bars", action="store_true", help="judge the issues' bars; exit 1 if one is short")
    options = parser.parse_args(arguments)
    if min(options.threads) < 1 or options.seconds <= 0:
        parser.error("--threads and --seconds: expected positive numbers")
    if options.bars:
        return bars(BARS, options.only, Measurements(CASES | SLOW, options.threads, options.seconds), options.out)
    try:
        chosen = select(options.only)
    except ValueError as error:
        parser.error(str(error))
    ceilings: dict[int, Ceilings] = {}

    def cases() -> Iterator[Case]:
        """One at a time, so that only one is in memory."""
        for build in chosen.values():
            update(ceilings, options.threads)
            yield build()

    rows = run(cases(), options.threads, options.seconds)
    update(ceilings, options.threads)
    rows = shares(rows, ceilings)
    report.table(rows, ceilings)
    for path in report.save(rows, ceilings, options.out):
        print(path)
    return int(any(row.status != "ok" for row in rows))


def bars(chosen: Sequence[Bar], only: Sequence[str], measurements: Measurements, out: Path) -> int:
    """Print a line per bar as soon as it is known, save what was measured for them; 1 if a judged one is short."""
    short = 0
    for bar in chosen:
        wanted = not only or any(name.lower() in f"{bar.issue} {bar.name}".lower() for name in only)
        if wanted and bar.threads in (None, *measurements.threads):
            verdict = judge(bar, measurements)
            short += verdict.state == "short"
            print(verdict, flush=True)
    if measurements.rows:
        report.save(shares(measurements.rows, measurements.ceilings), measurements.ceilings, out)
    return int(short > 0)


if __name__ == "__main__":
    sys.exit(main())
