"""Rule `calibrated` (ours): what the expert at work does not expect of arriving batches, before it learns from them.

Two charts (`levit.detector`), one number per batch each: the mean log VAE loss of its images, and, where images have
labels, how wrong it has them. Either may raise the alarm. Nothing is set per data set: the one parameter is the
expected number of images between two false alarms. docs/expansion.md has the statistics.

Old data may return: an expert whose charts find nothing in the suspect batches is *recalled*. Then no expert is added
and nothing is trained, a frozen expert least of all; the active one goes on when its own data come back.

Suspect batches are held back: nobody learns from them until they are cleared or an alarm says whose they are. An expert
that trained on them just before it was frozen would keep them for good, and so would its batch norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from levit.detector import WARM_UP, WINDOW, Chart, normal_score

EXPLAINS = 1.5
"""Mean score up to which an expert explains suspect batches. Its own data exceed it less than once in 400 times with
five batches and two charts; data it never saw rank above the whole window, where the score is 2.4."""

if TYPE_CHECKING:
    from levit.config import LEViTConfig
    from levit.reference import LEViT


class Surprise(NamedTuple):
    """What an expert did not expect of a batch."""

    vae: float
    """Mean log VAE loss of the images."""
    label: float | None
    """`label_surprise` of the images that have a label; None if none has."""


def label_surprise(logits: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy of logits [B, classes] and labels [B], B ≥ 1, but at least ln 2 / B.

    With less than that every label is right: a wrong one has a probability of ½ at most. Ranks know no scale, and
    without the bound a cross-entropy that creeps from 1e-4 to 1e-3, as a learner's does, would raise an alarm.
    """
    return max(F.cross_entropy(logits, labels).item(), math.log(2) / len(labels))


Batch = tuple[Tensor, Tensor]
"""Images and labels."""


class Change(NamedTuple):
    """The stream has another source since a few batches."""

    batches: list[Batch]
    """Those batches, oldest first. Nobody has learned from them."""
    expert: int | None
    """Who explains the new source: an expert's number, or None: nobody, a new one is wanted."""


class Verdict(NamedTuple):
    """What the newest batch decided, about itself and about those that were held back before it."""

    cleared: list[Batch]
    """Batches, oldest first, that are of the expert's at work: it may learn from them now."""
    change: Change | None


class CalibratedRule:
    """Watches a stream on behalf of the expert at work: the active one, or a frozen one that was recalled.

    Args:
        cfg: its `false_alarms_every` and `batch_size` decide the limit of the charts.
    """

    def __init__(self, cfg: LEViTConfig) -> None:
        self.limit = cfg.expansion_threshold
        self.charts = self._fresh()
        self.frozen: list[list[list[float]]] = []
        """Of each frozen expert: the windows of its two charts when it was frozen."""
        self.recalled: int | None = None
        self.waiting: list[list[float]] = []
        """While an expert is recalled: the windows of the active one."""
        self.suspects: list[Batch] = []
        """The newest batches, back to where the longer-suspecting chart left zero, but at most `WINDOW`."""

    @property
    def statistic(self) -> float:
        """The larger of both charts' sums."""
        return max(chart.statistic for chart in self.charts)

    def expert_at_work(self, model: LEViT) -> int:
        """The active expert, or the frozen one that was recalled."""
        return model.num_experts - 1 if self.recalled is None else self.recalled

    def observe(self, model: LEViT, images: Tensor, labels: Tensor) -> Verdict:
        """Look at the next batch, [b, C, S, S] and [b] int64 with -1 for no label, before anybody learns from it."""
        at_work = self.expert_at_work(model)
        surprise = model.surprise(images, labels, at_work)
        alarm = False
        for chart, value in zip(self.charts, surprise, strict=True):
            if value is not None:
                alarm |= chart.observe(value)
        self.suspects.append((images, labels))
        if alarm:
            cleared = self._clear(max(len(chart.suspect) for chart in self.charts if chart.statistic > chart.limit))
            return Verdict(cleared, Change(list(self.suspects), self._who_explains(model, at_work)))
        return Verdict(self._clear(max(len(chart.suspect) for chart in self.charts)), None)

    def expand(self) -> None:
        """The active expert was frozen and another one added, which starts with the suspect batches."""
        windows = self.waiting if self.recalled is not None else [chart.window for chart in self.charts]
        self.frozen.append(windows)
        self.recalled, self.waiting, self.suspects = None, [], []
        self.charts = self._fresh()

    def recall(self, expert: int, model: LEViT) -> None:
        """`expert` is at work from now on, a frozen one or the active one."""
        if self.recalled is None:
            self.waiting = [chart.window for chart in self.charts]
        if expert == model.num_experts - 1:
            self.charts = [Chart(self.limit, window) for window in self.waiting]
            self.recalled, self.waiting = None, []
        else:
            self.charts = [Chart(self.limit, window, fixed=True) for window in self.frozen[expert]]
            self.recalled = expert
        self.suspects = []

    def ignore(self) -> None:
        """The change has no consequence (no more experts are allowed): the expert at work goes on with the new data."""
        for chart in self.charts:
            chart.adapt()
        self.suspects = []

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors."""
        return {
            "charts": [chart.state_dict() for chart in self.charts],
            "frozen": [[list(window) for window in windows] for windows in self.frozen],
            "recalled": self.recalled,
            "waiting": [list(window) for window in self.waiting],
            "suspects": [list(batch) for batch in self.suspects],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.charts = [Chart.from_state(self.limit, chart) for chart in state["charts"]]
        self.frozen, self.recalled, self.waiting = state["frozen"], state["recalled"], state["waiting"]
        self.suspects = [(images, labels) for images, labels in state["suspects"]]

    def _fresh(self) -> list[Chart]:
        return [Chart(self.limit), Chart(self.limit)]

    def _clear(self, suspects: int) -> list[Batch]:
        """Nothing is the matter but with the newest `suspects` batches: let go of those before them."""
        count = max(0, len(self.suspects) - min(suspects, WINDOW))
        cleared, self.suspects = self.suspects[:count], self.suspects[count:]
        return cleared

    def _who_explains(self, model: LEViT, at_work: int) -> int | None:
        """The expert that finds the suspect batches least surprising, if they are no surprise to it."""
        candidates = dict(enumerate(self.frozen)) | ({} if self.recalled is None else {len(self.frozen): self.waiting})
        scores = {
            expert: max(self._mean_scores(model, expert, windows))
            for expert, windows in candidates.items()
            if expert != at_work and all(len(window) >= WARM_UP for window in windows if window)
        }
        best = min(scores, key=scores.__getitem__, default=None)
        return None if best is None or scores[best] > EXPLAINS else best

    def _mean_scores(self, model: LEViT, expert: int, windows: list[list[float]]) -> list[float]:
        """Of both charts, the mean score of the suspect batches among the expert's window."""
        surprises = [model.surprise(images, labels, expert) for images, labels in self.suspects]
        means = []
        for window, values in zip(windows, zip(*surprises, strict=True), strict=True):
            known = [normal_score(value, window) for value in values if value is not None and window]
            if known:
                means.append(sum(known) / len(known))
        return means or [float("inf")]
