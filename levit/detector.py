"""A sequential test for one number per batch: has it lately been larger than it used to be?

Nothing is assumed of the numbers but that, while nothing changes, any order of the last ones is as likely as another.
The rank of a new value among the window then is uniform, whatever the distribution, so the time between false alarms
can be computed instead of guessed (docs/expansion.md).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

WINDOW = 60
"""Values that a new one is ranked among."""

WARM_UP = 30
"""Values before the first test, the refractory period after an expansion: a young expert does not know what is usual,
and its running batch-norm statistics still follow."""

ALLOWANCE = 1.0
"""k of the CUSUM: half the shift, in standard deviations, that is found soonest."""

RUN_LENGTHS = ((2.0, 345), (3.0, 2_240), (4.0, 9_970), (5.0, 49_700), (6.0, 192_000))
"""Limit and batches between false alarms, as `python -m bench.run_length` simulates them."""


class Chart:
    """One-sided CUSUM of the normal scores of sequential ranks.

    S ← max(0, S + Φ⁻¹((r − ½)/(n + 1)) − k) with r the rank of the new value among itself and the n values of the
    window (ties share their mean rank); an alarm is S > limit. A change began where S last left zero; the values
    since then are *suspect* and join the window only when S is back at zero.

    Args:
        limit: what S must exceed, see `limit_for`.
        window: the values to start with, at most `WINDOW`, oldest first.
        fixed: keep to these values, as of an expert that learns no more, instead of following the newest.
    """

    def __init__(self, limit: float, window: list[float] | None = None, fixed: bool = False) -> None:
        self.limit = limit
        self.fixed = fixed
        self.window = list(window or [])
        self.suspect: list[float] = []
        self.statistic = 0.0

    def observe(self, value: float) -> bool:
        """Take in the next value; whether it raises the alarm."""
        if len(self.window) >= WARM_UP:
            self.statistic = max(0.0, self.statistic + normal_score(value, self.window) - ALLOWANCE)
        self.suspect.append(value)
        if self.statistic == 0:
            self.accept()
        return self.statistic > self.limit

    def accept(self) -> None:
        """Nothing is the matter with the suspect values: they join the window, and the sum begins anew."""
        if not self.fixed:
            self.window = [*self.window, *self.suspect][-WINDOW:]
        self.suspect, self.statistic = [], 0.0

    def adapt(self) -> None:
        """What the suspect values show is usual from now on: they are the whole window, after an alarm."""
        self.window = []
        self.accept()

    def state_dict(self) -> dict[str, Any]:
        """Plain types; the limit follows from the configuration."""
        return {
            "window": list(self.window),
            "suspect": list(self.suspect),
            "statistic": self.statistic,
            "fixed": self.fixed,
        }

    @classmethod
    def from_state(cls, limit: float, state: Mapping[str, Any]) -> Chart:
        """A chart that goes on from a saved state."""
        chart = cls(limit, state["window"], state["fixed"])
        chart.suspect, chart.statistic = list(state["suspect"]), float(state["statistic"])
        return chart


def normal_score(value: float, window: list[float]) -> float:
    """Φ⁻¹ of the value's relative rank among itself and the window: standard normal, but for the finite window."""
    less = sum(other < value for other in window)
    equal = sum(other == value for other in window)
    return NormalDist().inv_cdf((less + 0.5 * equal + 0.5) / (len(window) + 1))


def score_table(count: int) -> list[float]:
    """`normal_score` of a value that exceeds 0, 1, …, all of `count` others."""
    return [NormalDist().inv_cdf((less + 0.5) / (count + 1)) for less in range(count + 1)]


def limit_for(run_length: float) -> float:
    """The limit with which a chart raises a false alarm every `run_length` batches on average.

    Between the simulated values, and beyond them, the run length grows exponentially with the limit.
    """
    limits, lengths = zip(*RUN_LENGTHS, strict=True)
    right = min(max(bisect.bisect(lengths, run_length), 1), len(lengths) - 1)
    slope = (limits[right] - limits[right - 1]) / math.log(lengths[right] / lengths[right - 1])
    return limits[right] + slope * math.log(run_length / lengths[right])
