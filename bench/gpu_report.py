"""What a GPU run has found so far, and its three files: JSON, CSV and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from levit.runs import write_atomically


@dataclass
class Report:
    """What is known so far; `save` writes it three ways."""

    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    right: set[tuple[str, str, str]] = field(default_factory=set)  # (op, dtype, backend) that passed their check

    def add(self, step: str, **row: Any) -> None:
        self.rows.append({"step": step, **row})
        print("  ", *(f"{key}={value}" for key, value in row.items()), flush=True)

    def shares(self, dtype: str, tflops: float, gbs: float) -> dict[str, float]:
        """Of the ceilings that this run measured, in per cent."""
        ceilings = {row["what"]: row for row in self.rows if row["step"] == "ceiling"}
        shares = {}
        if f"matmul {dtype}" in ceilings:
            shares["%_of_matmul"] = round(100 * tflops / ceilings[f"matmul {dtype}"]["tflops"], 1)
        if "copy" in ceilings:
            shares["%_of_copy"] = round(100 * gbs / ceilings["copy"]["gbs"], 1)
        return shares

    def save(self, folder: Path) -> list[Path]:
        """gpu.json, gpu.csv and gpu.md in `folder`; an interrupted run leaves earlier files whole."""
        head = report.stamp() | {"device": self.device}
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        lines = [",".join(columns)] + [
            ",".join(str(row.get(c, "")).replace(",", ";") for c in columns) for row in self.rows
        ]
        texts = {
            "gpu.json": json.dumps(head | {"notes": self.notes, "rows": self.rows}, indent=1) + "\n",
            "gpu.csv": "\n".join(lines) + "\n",
            "gpu.md": _markdown(head, self.notes, self.rows),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, lambda file, text=text: file.write(text.encode()))
        return [folder / name for name in texts]


def _markdown(head: dict[str, Any], notes: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"# {head['device']}, {head['date']}", "", f"commit {head['commit']}, torch {head['torch']}", ""]
    for step in dict.fromkeys(row["step"] for row in rows):
        chosen = [row for row in rows if row["step"] == step]
        columns = [c for c in dict.fromkeys(key for row in chosen for key in row) if c != "step"]
        lines += [f"## {step}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(str(row.get(c, '')) for c in columns)} |" for row in chosen] + [""]
    return "\n".join([*lines, "## notes", "", *(f"- {note}" for note in notes), ""])
