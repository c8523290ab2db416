"""The progress of a run in a terminal, or as a line per event where the output is a file."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from levit.learner import Event
from levit.progress import Progress as RunProgress


class RichDisplay:
    """A progress bar with samples/s, loss, experts and the time left; a context manager.

    Args:
        console: where to write.
        total: images of the stream.
        start: image that the run starts from.
        experiences: how many there are, for the evaluator's lines.
        quiet: no bar, no lines.
    """

    def __init__(self, console: Console, total: int, experiences: int, quiet: bool = False) -> None:
        self.console = console
        self.experiences = experiences
        self.quiet = quiet
        self._loss = "-"
        self._first: tuple[int, float] | None = None
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:>5} images/s  loss {task.fields[loss]}  experts {task.fields[experts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("stream", total=total, speed="-", loss="-", experts=1)

    def __enter__(self) -> RichDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def batch(self, progress: RunProgress, event: Event, experts: int) -> None:
        """Move the bar."""
        if event.loss is not None:
            self._loss = f"{event.loss:.3g}"
        # A resumed run starts in the middle: its speed is that of this process.
        position, seconds = self._first = self._first or (progress.position, progress.seconds)
        elapsed = progress.seconds - seconds
        speed = f"{(progress.position - position) / elapsed:.0f}" if elapsed > 0 else "-"
        self._bar.update(self._task, completed=progress.position, speed=speed, loss=self._loss, experts=experts)

    def evaluated(self, progress: RunProgress, experience: int, experts: int) -> None:
        """One line per evaluation."""
        self.say(
            f"experience {experience + 1}/{self.experiences}, image {progress.position}: accuracy over the whole test "
            f"set {100 * (progress.accuracy or 0):.2f} %, {experts} expert{'s' if experts > 1 else ''}, "
            f"{progress.seconds:.0f} s"
        )

    def say(self, text: str) -> None:
        """One line of text above the bar."""
        if not self.quiet:
            self._bar.console.print(text, highlight=False, soft_wrap=True)
