"""The rows of metrics.csv for TensorBoard, as they are written. Needs the package tensorboard; torch only calls it."""

from __future__ import annotations

from collections.abc import Mapping

from levit.runs import COLUMNS, RunDirectory


class TensorBoardLog:
    """Event files in a run's folder `tensorboard`, one curve per column of metrics.csv over the images seen.

    Args:
        run: the run.
        position: images seen so far: later points of an earlier process are dropped, as from metrics.csv.

    Raises:
        ValueError: the package tensorboard is not installed.
    """

    def __init__(self, run: RunDirectory, position: int = 0) -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=position + 1 if position else None)

    def append(self, row: Mapping[str, float | None]) -> None:
        """Write one row (`levit.runs.COLUMNS`)."""
        for name in COLUMNS[1:]:
            if row[name] is not None:
                self._writer.add_scalar(name, row[name], int(row["samples"]))

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()


def check_tensorboard() -> None:
    """`ValueError` saying what to install, unless TensorBoard's writer can be had."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs the package tensorboard (pip install tensorboard); metrics.csv has the same ({error})"
        ) from error
