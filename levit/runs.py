"""A run directory: what one run was asked for, measured and learned; no file in it is ever half written.

config.json     what was asked for: effective configuration, options, data checksums, versions, command, commit
stream.npz      what came when: of each image its row in the data set, label, class there, and experience
metrics.csv     one row per logged position of the stream (`COLUMNS`)
checkpoint.pt   everything needed to go on; the latest one
results.json    the figures; present once the run is finished
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import pickle
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy
import torch

FORMAT = 2
"""Version of the files in a run directory."""

COLUMNS = (
    "samples",
    "loss",
    "experts",
    "min_distance",
    "threshold",
    "seconds",
    "samples_per_second",
    "accuracy",
)
"""metrics.csv: images seen; mean loss since the row before; experts; the largest value since the row before of what the
rule compares (published rules: the smallest distance of a check), and its threshold; training seconds so far; images
per training second since the row before; per-sample accuracy over the whole test set. Empty where there is none."""


class RunError(RuntimeError):
    """A run directory that cannot be used as asked; the message says what to do, and nothing was changed."""


class RunDirectory:
    """The files of one run below `path`; see the module's docstring."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        """Whether a run was ever started here."""
        return (self / "config.json").exists()

    @property
    def finished(self) -> bool:
        """Whether the run here came to its end."""
        return (self / "results.json").exists()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; `RunError` where another one does.

        The system drops the lock with its process, so one that was killed leaves nothing to clean up.
        """
        if self.path.is_dir() and not self.exists and any(p.name != ".lock" for p in self.path.iterdir()):
            raise RunError(f"{self.path}: holds files but no run; choose another --out")
        with _explained(self.path, "cannot be created"):
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self / ".lock", "a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise RunError(
                    f"{self.path}: process {holder} is writing this run; wait for it or choose another --out"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def read_config(self) -> dict[str, Any]:
        """config.json; `RunError` where there is no run or it is of another version."""
        if not self.exists:
            raise RunError(f"{self.path}: no run here (no config.json)")
        return self._read_json("config.json")

    def read_results(self) -> dict[str, Any]:
        """results.json; `RunError` where the run is not finished."""
        if not self.finished:
            self.read_config()
            raise RunError(f"{self.path}: not finished yet (no results.json); go on with levit train … --resume")
        return self._read_json("results.json")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json."""
        write_atomically(self / "config.json", _json_writer({"format": FORMAT} | dict(config)))

    def write_stream(self, record: Mapping[str, numpy.ndarray]) -> None:
        """Write stream.npz (`levit.streams.Stream.record`)."""
        write_atomically(self / "stream.npz", lambda file: numpy.savez_compressed(file, **record))

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json, which marks the run as finished."""
        write_atomically(self / "results.json", _json_writer({"format": FORMAT} | dict(results)))

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write checkpoint.pt (tensors and plain types only)."""
        write_atomically(self / "checkpoint.pt", lambda file: torch.save({"format": FORMAT} | dict(state), file))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """checkpoint.pt, on the CPU; None where there is none yet, `RunError` where it cannot be read."""
        path = self / "checkpoint.pt"
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            version = state["format"]
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RunError(f"{path}: corrupt, or no checkpoint of ours ({reason}); nothing was changed") from error
        self._check_format(path, version)
        return state

    def read_metrics(self) -> list[dict[str, float | None]]:
        """The complete rows of metrics.csv, numbers or None by column."""
        path = self / "metrics.csv"
        if not path.exists():
            return []
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
        if rows and tuple(rows[0]) != COLUMNS:
            raise RunError(f"{path}: expected the columns {', '.join(COLUMNS)}, got {', '.join(rows[0])}")
        # A process that was killed may leave half a line, and no run ends without the line break.
        return [
            {name: float(value) if value else None for name, value in zip(COLUMNS, row, strict=True)}
            for row in rows[1:]
            if len(row) == len(COLUMNS)
        ]

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self / name).read_text())
            version = content["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self / name}: corrupt ({error})") from error
        self._check_format(self / name, version)
        return content

    def _check_format(self, path: Path, version: object) -> None:
        if version != FORMAT:
            older = isinstance(version, int) and version < FORMAT
            age = "an older" if older else "a newer" if isinstance(version, int) else "another"
            raise RunError(
                f"{path}: format {version!r} of {age} version of levit; this one reads format {FORMAT}. "
                "Read it with the commit named in it, or train again into another --out"
            )


class MetricsLog:
    """Appends rows to metrics.csv. Opened at position p of the stream, it first drops every row past p.

    So an interrupted run that goes on from its checkpoint leaves the file of a run that never stopped.
    """

    def __init__(self, run: RunDirectory, position: int) -> None:
        self.path = run / "metrics.csv"
        if position and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= position]
            write_atomically(self.path, lambda file: file.write("".join([lines[0], *kept]).encode()))
        else:
            write_atomically(self.path, lambda file: file.write((",".join(COLUMNS) + "\n").encode()))
        self._file = open(self.path, "a", newline="")

    def append(self, row: Mapping[str, float | None]) -> None:
        """Write one row, to disk at once."""
        values = ["" if row[name] is None else f"{row[name]:.6g}" for name in COLUMNS[1:]]
        with _explained(self.path, "cannot be written"):
            self._file.write(",".join([str(row["samples"]), *values]) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file beside `path`, then rename it: whoever reads `path` sees the old file or the new one.

    Raises:
        RunError: it could not be written (a full disk, say); the earlier file is untouched.
    """
    beside = path.with_name(path.name + ".part")
    try:
        # torch reports a failing file as RuntimeError.
        with _explained(path, "cannot be written", (OSError, RuntimeError)), open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with _explained(path, "cannot be written"):
            os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def new_run_path(stem: Path) -> Path:
    """The first of `stem`, `stem-2`, `stem-3`, … where no run is yet, created so that no other process takes it."""
    n = 1
    while True:
        path = stem if n == 1 else stem.with_name(f"{stem.name}-{n}")
        try:
            with _explained(path, "cannot be created", (PermissionError, NotADirectoryError)):
                path.mkdir(parents=True)
            return path
        except FileExistsError:
            n += 1


def latest_run_path(stem: Path) -> Path:
    """The last of `stem`, `stem-2`, … that holds a run; `RunError` where none does."""
    found, n = None, 1
    while (path := stem if n == 1 else stem.with_name(f"{stem.name}-{n}")).exists():
        found = path if RunDirectory(path).exists else found
        n += 1
    if found is None:
        raise RunError(f"{stem}: no run to resume here; name its directory with --out")
    return found


def environment() -> dict[str, Any]:
    """Versions that a result may depend on, and the commit of the checkout, if this is one."""
    return {
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "platform": platform.platform(),
        },
    }


def commit() -> str | None:
    """The commit of the checkout that this package lies in, with `+changes` where files differ; None without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        name, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return name + ("+changes" if changes else "")


def _json_writer(content: Mapping[str, Any]) -> Callable[[IO[bytes]], Any]:
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    return lambda file: file.write(text.encode())


@contextlib.contextmanager
def _explained(path: Path, what: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise RunError(f"{path}: {what} ({reason}); earlier results are kept") from error
