"""report.html: a run on one page that can be mailed, pictures included."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from levit.families import family_of
from levit.report.tables import COLUMNS, HEADINGS, result_rows
from levit.runs import RunDirectory, write_atomically

CAPTIONS = {
    "accuracy.png": "Accuracy and experts over the stream; below, the expansion rule's statistic and its threshold.",
    "matrix.png": "Accuracy on each experience's test images (columns) after each experience (rows).",
    "gates.png": "Gates: how much each expert's classifier (row) takes of each expert's features (column).",
    "samples.png": "Images drawn from each expert's autoencoder, one row per expert, 0 the oldest.",
    "comparison.png": "Every run: test accuracy over all classes, and experts, over the stream; then each experience's "
    "accuracy at the end.",
}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; }
.wide { overflow-x: auto; }
code { font-size: .9rem; overflow-wrap: anywhere; }
"""


def write_page(run: RunDirectory, plots: Sequence[Path]) -> Path:
    """Write a finished run's report.html, with these plots inside; returns its path."""
    config, results = run.read_config(), run.read_results()
    title = run_title(config)
    figures = [_heading("Plots"), *(_figure(path.name, path.read_bytes()) for path in plots)] if plots else []
    stream = config["stream"]
    parts = [
        _rows({name: show(results[key]) for key, (name, show) in COLUMNS.items() if results.get(key) is not None}),
        *figures,
        _heading("How to get this again"),
        _rows(
            {
                "command": config["command"],
                "commit": results["commit"] or "not a checkout",
                "data": f"{config['data']['name']}, sha256 {config['data']['sha256']}",
                "scenario": stream["scenario"],
                "classes, by experience": "; ".join(" ".join(map(str, group)) for group in stream["experiences"]),
                "images": f"{results['images']}",
                "test images": f"{results['test_images']}",
                **config["versions"],
            }
        ),
        _heading("Configuration"),
        _rows(config["config"] | config["options"]),
    ]
    return write_html(run / "report.html", title, protocols([config]), parts)


def write_comparison(runs: Sequence[RunDirectory], path: Path, plot: bytes | None) -> Path:
    """Write a page with the result table of several finished runs, and a plot (PNG) of them all; returns its path."""
    contents = [(run.read_config(), run.read_results()) for run in runs]
    cells = result_rows(contents)
    columns = zip(HEADINGS, *cells, strict=True)  # a run per column: few runs, many figures
    body = "".join(f"<tr><th>{escape(name)}" + "".join(f"<td>{escape(cell)}" for cell in row) for name, *row in columns)
    figures = [] if plot is None else [_heading("Plots"), _figure("comparison.png", plot)]
    listed = {str(run.path): config["command"] for run, (config, _) in zip(runs, contents, strict=True)}
    parts = [
        f"<div class=wide><table>{body}</table></div>",
        *figures,
        _heading("Runs"),
        _rows(listed),
    ]
    return write_html(path, "Runs side by side", protocols([config for config, _ in contents]), parts)


def run_title(config: Mapping[str, Any]) -> str:
    """What a run is called: preset, method and seed."""
    return f"{config['preset']} {config['options']['method']} seed {config['config']['seed']}"


def protocols(configs: Sequence[Mapping[str, Any]]) -> str:
    """How these runs were trained and evaluated, in a line."""
    shown = " | ".join(
        dict.fromkeys(family_of(config["preset"], config["options"]["method"]).protocol for config in configs)
    )
    return f"{shown[0].upper()}{shown[1:]}; accuracy per sample over all classes."


def write_html(path: Path, title: str, subtitle: str, parts: Sequence[str]) -> Path:
    """Write a page of our style with this title, a line under it and these pieces of HTML; returns its path."""
    text = "\n".join(
        [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(subtitle)}</p>",
            *parts,
            "</html>\n",
        ]
    )
    write_atomically(path, lambda file: file.write(text.encode()))
    return path


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _rows(content: Mapping[str, Any]) -> str:
    rows = (f"<tr><th>{escape(key)}<td><code>{escape(str(value))}</code>" for key, value in content.items())
    return f"<table>{''.join(rows)}</table>"


def _figure(name: str, image: bytes) -> str:
    return figure_html(CAPTIONS.get(name, Path(name).stem), image)


def figure_html(caption: str, image: bytes) -> str:
    """A PNG inside the page, with its caption."""
    data = base64.b64encode(image).decode()
    caption = escape(caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )
