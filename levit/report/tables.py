"""The result table of one or more runs: one row per configuration, mean ± standard deviation over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from levit.families import ALL_PRESETS, family_of

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "final_accuracy": ("accuracy %", lambda v: f"{100 * v:.2f}"),
    "route_accuracy": ("route %", lambda v: f"{100 * v:.2f}"),
    "average_accuracy": ("average %", lambda v: f"{100 * v:.2f}"),
    "anytime_accuracy": ("anytime %", lambda v: f"{100 * v:.2f}"),
    "forgetting": ("forgetting", lambda v: f"{100 * v:.2f}"),
    "backward_transfer": ("BWT", lambda v: f"{100 * v:+.2f}"),
    "num_experts": ("experts", lambda v: f"{v:g}" if v == int(v) else f"{v:.1f}"),
    "updates_per_sample": ("updates/image", lambda v: f"{v:.2f}"),
    "parameters": ("parameters", lambda v: f"{v / 1e6:.2f} M"),
    "samples_per_second": ("images/s", lambda v: f"{v:.0f}"),
    "peak_memory_mib": ("peak MiB", lambda v: f"{v:.0f}"),
}
"""Fields of results.json that the table shows: heading and format. Definitions: `levit.metrics`."""


HEADINGS = ("run", "seeds", *(heading for heading, _ in COLUMNS.values()))


def result_rows(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """Cells under `HEADINGS`, of runs given as (config.json, results.json); seeds of one configuration share a row."""
    groups: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for config, results in runs:
        groups.setdefault(run_label(config), []).append((config, results))
    rows = []
    for label, members in groups.items():
        seeds = sorted(config["config"]["seed"] for config, _ in members)
        cells = [_cell([results.get(name) for _, results in members], show) for name, (_, show) in COLUMNS.items()]
        rows.append((label, ",".join(map(str, seeds)), *cells))
    return rows


def result_table(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """`result_rows` for a terminal."""
    protocols = dict.fromkeys(family_of(config["preset"], config["options"]["method"]).protocol for config, _ in runs)
    table = Table(title=f"Per-sample accuracy over all classes, {' | '.join(protocols)}", title_justify="left")
    table.add_column(HEADINGS[0], overflow="fold")
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in result_rows(runs):
        table.add_row(*row)
    return table


def matrix_table(results: Mapping[str, Any]) -> Table:
    """The accuracy matrix in percent: rows after each experience, columns the experiences' test images."""
    matrix = results["accuracy_matrix"]
    title = "Accuracy % on each experience's test images"
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("after")
    for j in range(len(matrix)):
        table.add_column(str(j + 1), justify="right")
    for i, row in enumerate(matrix):
        if row is not None:
            table.add_row(str(i + 1), *(f"{100 * value:.1f}" for value in row))
    return table


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation of the sample (n - 1 in the denominator; 0 for one value)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def run_label(config: Mapping[str, Any]) -> str:
    """Preset, method, and every choice that differs from the preset's, but for the seed."""
    preset = config["preset"]
    usual = family_of(preset).config.preset(preset).to_dict() if preset in ALL_PRESETS else {}
    changes = {key: value for key, value in config["config"].items() if key != "seed" and usual.get(key) != value}
    for option in ("limit", "test_limit"):
        if config["options"][option] is not None:
            changes[option] = config["options"][option]
    return " ".join([preset, config["options"]["method"], *(f"{key}={value}" for key, value in changes.items())])


def _cell(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, deviation = mean_and_deviation(known)
    return show(mean) if len(known) == 1 else f"{show(mean)} ± {show(deviation).lstrip('+')}"
