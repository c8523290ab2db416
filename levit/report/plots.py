"""Plots of a run. They need matplotlib, the only module here that does."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from levit.families import family_of
from levit.inference import load_model
from levit.report.tables import run_label
from levit.runs import RunDirectory, write_atomically

BLUE, ORANGE, GREY = "#1f5fa8", "#d1661d", "#8a8a8a"


def write_plots(run: RunDirectory) -> list[Path]:
    """Draw every plot of a finished run into its directory; returns the files."""
    model = load_model(run)
    config, results = run.read_config(), run.read_results()
    figures = {
        "accuracy.png": accuracy_plot(config, run.read_metrics(), results["accuracy_matrix"]),
        "matrix.png": matrix_plot(results["accuracy_matrix"]),
    }
    if config["options"]["method"] not in (
        "finetune",
        "slda",
        "dytox",
        "dytox-free",
    ):  # without a VAE, or without a trained one
        figures["samples.png"] = samples_plot(model)
        if model.cfg.gating == "learned" and model.num_experts > 1:
            figures["gates.png"] = gates_plot(model)
    for name, figure in figures.items():
        write_atomically(run / name, lambda file, figure=figure: file.write(png(figure)))
    return [run / name for name in figures]


def png(figure: Figure) -> bytes:
    """A figure as a PNG file's content."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def accuracy_plot(
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, float | None]],
    matrix: Sequence[Sequence[float] | None],
) -> Figure:
    """Accuracy and experts over the stream, and below them the expansion rule's statistic where it was computed."""
    ends = config["stream"]["ends"]
    checks = [row for row in rows if row["min_distance"] is not None]
    figure = Figure(figsize=(8, 6 if checks else 4), layout="constrained")
    heights = [2, 1] if checks else [1]
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]

    top = panels[0]
    evaluated = [row for row in rows if row["accuracy"] is not None]
    whole = top.plot(*_columns(evaluated, "accuracy", 100), "o-", color=BLUE, label="accuracy, all classes")
    seen = [(end, 100 * np.mean(row[: i + 1])) for i, (end, row) in enumerate(zip(ends, matrix, strict=True)) if row]
    so_far = top.plot(*zip(*seen, strict=True), "s--", color=GREY, label="accuracy, classes seen so far")
    top.set(ylim=(0, 102), ylabel="test accuracy %", title=f"{config['preset']} {config['options']['method']}")
    right = top.twinx()
    samples, experts = _columns(rows, "experts")
    count = right.step([0, *samples], [1, *experts], where="post", color=ORANGE, label="experts")
    right.set(ylim=(0, None), ylabel="experts")
    right.yaxis.get_major_locator().set_params(integer=True)
    lines = [*whole, *so_far, *count]
    top.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=3, frameon=False)

    if checks:
        one = config["options"]["method"] == "dytox-free"
        charts = one or config["config"].get("criterion") == "calibrated"
        what = "sum of the chart" if one else "larger sum of both charts" if charts else "smallest distance"
        panels[1].plot(*_columns(checks, "min_distance"), ".", markersize=4, color=BLUE, label=what)
        panels[1].plot(*_columns(checks, "threshold"), color=ORANGE, label="limit" if charts else "threshold")
        panels[1].set(ylabel="expansion rule")
        panels[1].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    for panel in panels:
        panel.grid(alpha=0.3)
        for change in ends[:-1]:
            panel.axvline(change, color=GREY, linewidth=0.8, linestyle=":")
    borders = family_of(config["preset"], config["options"]["method"]).borders
    panels[-1].set(xlabel=f"images of the stream (dotted: {borders})", xlim=(0, ends[-1]))
    return figure


def comparison_plot(runs: Sequence[RunDirectory]) -> Figure:
    """Runs side by side: accuracy and experts over the stream, and the last row of each accuracy matrix."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        config, results, rows = run.read_config(), run.read_results(), run.read_metrics()
        label = f"{run_label(config)} seed {config['config']['seed']}"
        color = f"C{i % 10}"
        evaluated = [row for row in rows if row["accuracy"] is not None]
        top.plot(*_columns(evaluated, "accuracy", 100), "o-", color=color, label=label)
        samples, experts = _columns(rows, "experts")
        middle.step([0, *samples], [1, *experts], where="post", color=color)
        last = 100 * np.array(results["accuracy_matrix"][-1])
        bottom.bar(1 + np.arange(len(last)) + (i - (len(runs) - 1) / 2) * width, last, width, color=color)
    top.set(ylim=(0, 102), ylabel="test accuracy %, all classes", xlabel="images of the stream")
    middle.set(ylim=(0, None), ylabel="experts", xlabel="images of the stream")
    bottom.set(ylim=(0, 102), ylabel="accuracy % at the end", xlabel="experience")
    for panel in (middle.yaxis, bottom.xaxis):
        panel.get_major_locator().set_params(integer=True)
    for panel in (top, middle, bottom):
        panel.grid(alpha=0.3)
    figure.legend(loc="outside upper left", frameon=False)
    return figure


def matrix_plot(matrix: Sequence[Sequence[float] | None]) -> Figure:
    """The accuracy matrix as a heat map, in percent."""
    values = np.array([row or [np.nan] * len(matrix) for row in matrix], dtype=float)
    columns, rows = "test images of experience", "after experience"
    return _heat_map(100 * values, "{:.0f}", "accuracy %", columns, rows, top=100, first=1)


def gates_plot(model: nn.Module) -> Figure:
    """The gates g_k of every expert k (row) over the experts that it gates (columns), averaged over heads."""
    count = model.num_experts
    values = np.full((count, count), np.nan)
    for k in range(count):
        gates = model.gates(k).detach().cpu()
        values[k, : len(gates)] = gates if gates.dim() == 1 else gates.mean(1)
    return _heat_map(values, "{:.2f}", "gate", "features of expert", "classifier of expert", top=1, first=0)


def samples_plot(model: nn.Module, columns: int = 10) -> Figure:
    """Images drawn from each expert's VAE, one row per expert: what the expert believes its data to be."""
    cfg, count = model.cfg, model.num_experts
    codes = torch.randn(columns, cfg.latent_dim, generator=torch.Generator().manual_seed(0))
    figure = Figure(figsize=(0.7 * columns + 0.6, 0.72 * count + 0.3), layout="constrained")
    panels = figure.subplots(count, columns, squeeze=False)
    for k, row in enumerate(panels):
        with torch.no_grad():
            images = model.experts[k].vae.decode(codes.to(model.weight)).clamp(0, 1).cpu()
        side = math.isqrt(images.shape[1] // cfg.channels)  # a VAE may work at a size of its own
        images = images.view(columns, cfg.channels, side, side).permute(0, 2, 3, 1)
        for panel, image in zip(row, images.numpy(), strict=True):
            panel.imshow(image.squeeze(-1) if cfg.channels == 1 else image, cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(str(k), rotation=0, ha="right", va="center")
    return figure


def _heat_map(values: np.ndarray, form: str, what: str, columns: str, rows: str, top: float, first: int) -> Figure:
    count = len(values)
    side = 2 + 0.42 * count
    figure = Figure(figsize=(side + 1.6, side), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(values, cmap="Blues", vmin=0, vmax=top)
    figure.colorbar(image, label=what, shrink=0.8)
    step = 1 + count // 20
    names = [str(i + first) for i in range(0, count, step)]
    panel.set_xticks(range(0, count, step), names)
    panel.set_yticks(range(0, count, step), names)
    panel.set(xlabel=columns, ylabel=rows)
    if count <= 20:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "white" if value > 0.6 * top else "black"
                panel.text(j, i, form.format(value), ha="center", va="center", fontsize=8, color=color)
    return figure


def _columns(rows: Sequence[Mapping[str, float | None]], name: str, factor: float = 1) -> tuple[list[float], ...]:
    return [row["samples"] for row in rows], [factor * row[name] for row in rows]
