"""Which of a few configurations a kernel runs with: the first, unless LEVIT_KERNELS_TUNE=1 asks to time them here.

A configuration is chosen once per bucket of sizes and remembered on disk, per device and per version of Triton, so that
no later process waits for it. Without tuning nothing is read, timed or written.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

T = TypeVar("T")
ENVIRONMENT = "LEVIT_KERNELS_TUNE"
_tables: dict[Path, dict[str, str]] = {}


def choose(op: str, bucket: tuple, candidates: Sequence[T], run: Callable[[T], Any], device: torch.device) -> T:
    """The candidate to run with; `candidates[0]` is the default. `run(candidate)` is what is timed."""
    if len(candidates) == 1 or not _is_asked_for(device):
        return candidates[0]
    path, key, names = _path(device), f"{op} {bucket}", [repr(x) for x in candidates]
    table = _tables.setdefault(path, _read(path))
    if table.get(key) not in names:  # unknown, or of a version with other candidates
        seconds = [_seconds(run, x) for x in candidates]
        table[key] = names[seconds.index(min(seconds))]
        _write(path, table)
    return candidates[names.index(table[key])]


def bucket_of(size: int) -> int:
    """Sizes up to the same power of two share a configuration."""
    return triton.next_power_of_2(max(size, 1))


def _is_asked_for(device: torch.device) -> bool:
    """Never while a CUDA graph is captured: timing would be captured too."""
    asked = os.environ.get(ENVIRONMENT) == "1" and device.type == "cuda"
    return asked and not torch.cuda.is_current_stream_capturing()


def _seconds(run: Callable[[T], Any], candidate: T) -> float:
    """Median of a few event-timed calls; infinite for a candidate that this GPU cannot run."""
    try:
        return triton.testing.do_bench(lambda: run(candidate), warmup=5, rep=20, return_mode="median")
    except (RuntimeError, triton.runtime.errors.OutOfResources):
        return float("inf")


def _path(device: torch.device) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "levit_kernels"
    name = f"{torch.cuda.get_device_name(device)} triton {triton.__version__}"
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.json"


def _read(path: Path) -> dict[str, str]:
    """What is known; a file that cannot be read is no reason to fail."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _write(path: Path, table: dict[str, str]) -> None:
    """In one move, so that processes that tune at the same time leave a whole file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(table, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return  # a read-only home: the choice holds for this process
