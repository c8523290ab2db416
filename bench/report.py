"""One table of measured rows for people, JSON and CSV beside it for machines, all stamped with where they come from."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench.ceilings import Ceilings
from bench.harness import Row
from levit.runs import commit, write_atomically

ROOT = Path(__file__).resolve().parent.parent
LATEST = ROOT / "bench" / "results" / "latest"
PLAIN_WIDTH = 180  # a log file has no width; rich would assume 80 columns and cut the table


def stamp(threads: Sequence[int] = ()) -> dict[str, Any]:
    """Commit, date (UTC), CPU model, versions and thread counts of a measurement."""
    return {
        "commit": commit() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": list(threads),
    }


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(rows: Sequence[Row], ceilings: Mapping[int, Ceilings] | None = None, file: IO[str] | None = None) -> None:
    """Print one table of all rows, and the ceilings under it; plain text where the output is no terminal."""
    console = Console(file=file or sys.stdout)
    if not console.is_terminal:
        console = Console(file=file or sys.stdout, width=PLAIN_WIDTH)
    grid = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII)
    for title in ("case", "size", "variant"):
        grid.add_column(title, no_wrap=True)
    for title in ("thr", "median ms", "p20", "p80", "rounds", "speed-up", "GFLOP/s", "GB/s", "% FMA", "% read"):
        grid.add_column(title, justify="right", no_wrap=True)
    grid.add_column("check", overflow="fold")
    previous = None
    for row in rows:
        if previous is not None and (row.case, row.size, row.threads) != previous:
            grid.add_section()
        previous = (row.case, row.size, row.threads)
        grid.add_row(
            row.case,
            row.size,
            row.variant,
            str(row.threads),
            *(_text(t, 1e3, 3) for t in (row.median, row.p20, row.p80)),
            str(row.rounds),
            _text(row.speedup, 1, 2, "x"),
            _text(row.gflops, 1, 1),
            _text(row.gbs, 1, 1),
            _text(row.fma_share, 100, 0),
            _text(row.read_share, 100, 0),
            row.status,
            style=None if row.status == "ok" else "red",
        )
    console.print(grid)
    for figures in (ceilings or {}).values():
        console.print(f"ceilings, {figures}", highlight=False)


def save(
    rows: Sequence[Row], ceilings: Mapping[int, Ceilings] | None = None, folder: Path | str = LATEST
) -> tuple[Path, Path]:
    """Write `bench.json` and `bench.csv` into `folder`; an interrupted run leaves the earlier files whole."""
    folder = Path(folder)
    head = stamp(sorted({row.threads for row in rows}))
    document = head | {
        "ceilings": [dataclasses.asdict(figures) for figures in (ceilings or {}).values()],
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    lines = io.StringIO()
    columns = [field.name for field in dataclasses.fields(Row)]
    stamped = ["commit", "date", "cpu", "torch"]
    writer = csv.DictWriter(lines, columns + stamped, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) | {key: head[key] for key in stamped} for row in rows)
    json_path, csv_path = folder / "bench.json", folder / "bench.csv"
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((json_path, json.dumps(document, indent=1) + "\n"), (csv_path, lines.getvalue())):
        write_atomically(path, lambda file, text=text: file.write(text.encode()))
    return json_path, csv_path


def _text(value: float | None, scale: float, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}{unit}"
