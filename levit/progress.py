"""Where a run stands, and what its next row of metrics.csv says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from levit.learner import Event


@dataclass
class Progress:
    """Counters of a run; plain types, saved with each checkpoint."""

    position: int = 0
    """Images seen."""
    seconds: float = 0.0
    """Spent on learning: neither evaluation nor files."""
    evaluation_seconds: float = 0.0
    updates: int = 0
    """Optimizer steps."""
    accuracy: float | None = None
    """Per-sample accuracy at the latest evaluation."""
    route_accuracy: float | None = None
    """At the latest evaluation; None where there was one expert and nothing to choose."""
    matrix: list[list[float] | None] = field(default_factory=list)
    """Rows of the accuracy matrix so far; None where none was due."""
    expansions: list[int] = field(default_factory=list)
    """Positions at which an expert was added."""
    seen: list[list[int]] = field(default_factory=list)
    """[K][kinds] images of each kind that were each expert's (`Event.expert`); for the evaluator alone."""
    latest_expert: int = 0
    """Whose the latest batch was."""
    losses: list[float] = field(default_factory=list)
    """Since the latest row of metrics.csv; so are the other fields below."""
    min_distance: float | None = None
    row_position: int = 0
    row_seconds: float = 0.0

    def count(self, event: Event, images: int, updates_per_batch: int) -> None:
        """Take in what one `observe` of a batch of `images` did."""
        self.position += images
        if event.loss is not None:
            self.updates += updates_per_batch
            self.losses.append(event.loss)
        if event.distances is not None:
            latest = float(event.distances.min())
            self.min_distance = latest if self.min_distance is None else max(self.min_distance, latest)
        if event.expanded:
            self.expansions.append(self.position)

    def count_kinds(self, kinds: np.ndarray, moved: np.ndarray, expert: int, num_kinds: int) -> None:
        """Take in the kinds [b] of a batch's images (`levit.streams.Stream.kinds`), and the expert whose they are.

        `moved` [n] are the kinds of those before it that turned out to be that expert's too.
        """
        while len(self.seen) <= expert:
            self.seen.append([0] * num_kinds)
        for kind in moved.tolist():
            self.seen[self.latest_expert][kind] -= 1
        for kind in [*moved.tolist(), *kinds.tolist()]:
            self.seen[expert][kind] += 1
        self.latest_expert = expert

    def crossed(self, every: int, images: int) -> bool:
        """Whether a multiple of `every` lies within the latest batch of `images`."""
        return self.position // every > (self.position - images) // every

    def row(self, experts: int, threshold: float, evaluated: bool) -> dict[str, float | None]:
        """The next row of metrics.csv (`levit.runs.COLUMNS`); what is counted from row to row starts again."""
        seconds = self.seconds - self.row_seconds
        row = {
            "samples": self.position,
            "loss": sum(self.losses) / len(self.losses) if self.losses else None,
            "experts": experts,
            "min_distance": self.min_distance,
            "threshold": None if self.min_distance is None else threshold,
            "seconds": self.seconds,
            "samples_per_second": (self.position - self.row_position) / seconds if seconds > 0 else None,
            "accuracy": self.accuracy if evaluated else None,
        }
        self.losses, self.min_distance = [], None
        self.row_position, self.row_seconds = self.position, self.seconds
        return row
