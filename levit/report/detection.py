"""The detection report: table, CSV, and a page with each rule's statistic and its limit over the stream."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from levit.detection import HEADINGS, detection_rows
from levit.report.page import figure_html, write_html
from levit.runs import RunDirectory, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = dict[tuple[str, str], list[RunDirectory]]
"""Finished runs by (stream, rule)."""


SUBTITLE = "Changes are known to this report alone; an alarm adds an expert. One pass, no task labels."


def detection_table(runs: Runs) -> Table:
    """`levit.detection.detection_rows` for a terminal."""
    table = Table(title="Changes of the stream that each rule found, and alarms without a change", title_justify="left")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if i < 2 else "right")
    for row in detection_rows(runs):
        table.add_row(*row)
    return table


def write_detection(runs: Runs, out: Path, say: Callable[[str], object]) -> None:
    """Write detection.csv and detection.html into `out`; without matplotlib the page has no plots, and that is said."""
    rows = detection_rows(runs)
    text = io.StringIO()
    csv.writer(text).writerows([HEADINGS, *rows])
    write_atomically(out / "detection.csv", lambda file: file.write(text.getvalue().encode()))
    head = "".join(f"<th>{escape(name)}" for name in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    parts = [f"<div class=wide><table><tr>{head}{body}</table></div>"]
    try:
        from levit.report.plots import png
    except ImportError:
        say("no plots: matplotlib is not installed (pip install matplotlib)")
    else:
        parts += [
            figure_html(
                f"{stream}, rule {rule}, seed {members[0].read_config()['config']['seed']}", png(plot(members[0]))
            )
            for (stream, rule), members in runs.items()
        ]
    write_html(out / "detection.html", "Detection of changes", SUBTITLE, parts)
    say(f"written: {out / 'detection.csv'}, {out / 'detection.html'}")


def plot(run: RunDirectory) -> Figure:
    """The statistic of a run's rule with its limit; dotted lines are changes, triangles expansions."""
    from matplotlib.figure import Figure

    rows = [row for row in run.read_metrics() if row["min_distance"] is not None]
    figure = Figure(figsize=(8, 2.2), layout="constrained")
    panel = figure.subplots()
    samples = [row["samples"] for row in rows]
    panel.plot(samples, [row["min_distance"] for row in rows], linewidth=0.9, color="#1f5fa8", label="statistic")
    panel.plot(samples, [row["threshold"] for row in rows], color="#d1661d", label="limit")
    ends = run.read_config()["stream"]["ends"]
    for change in ends[:-1]:
        panel.axvline(change, color="#8a8a8a", linewidth=0.9, linestyle=":")
    for at in run.read_results()["expansions"]:
        panel.plot(at, 0, "^", color="#b3202c", markersize=7, clip_on=False)
    panel.set(xlim=(0, ends[-1]), xlabel="images of the stream (dotted: changes; triangles: experts added)")
    panel.legend(loc="upper right", frameon=False, fontsize=8)
    panel.grid(alpha=0.3)
    return figure
