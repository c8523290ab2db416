"""A sequential test for one number per batch: has it lately been larger than it used to be?

Nothing is assumed of the numbers but that, while nothing changes, any order of the last ones is as likely as another.
The rank of a new value among the window then is uniform, whatever the distribution, so the time between false alarms
can be computed instead of guessed (docs/expansion.md).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

WINDOW = 60
"""Values that a new one is ranked among."""

WARM_UP = 30
"""Values before the first test, the refractory period after an expansion: a young expert does not know what is usual,
and its running batch-norm statistics still follow."""

ALLOWANCE = 1.0
"""k of the CUSUM: half the shift, in standard deviations, that is found soonest."""

_GRID = 120  # cells between 0 and the limit, in the Markov chain that the limit is computed with


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


@functools.cache
def limit_for(run_length: float) -> float:
    """The limit with which a full window raises a false alarm every `run_length` batches on average.

    By bisection over `average_run_length`. With fewer values the scores are smaller, and false alarms rarer.
    """
    low, high = 0.0, 1.0
    while average_run_length(high) < run_length:
        low, high = high, high + 1
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if average_run_length(middle) < run_length else (low, middle)
    return high


def average_run_length(limit: float) -> float:
    """Batches until S, from zero, exceeds the limit while nothing changes; ranks are taken as independent.

    Brook & Evans (1972): S moves on a grid as a Markov chain, whose expected time to absorption is a linear system.
    """
    n = WINDOW + 1
    scores = np.array([NormalDist().inv_cdf((rank + 0.5) / n) for rank in range(n)])
    cells = (np.arange(_GRID + 1)) * limit / _GRID
    landed = np.rint((cells[:, None] + scores - ALLOWANCE) / limit * _GRID).clip(min=0).astype(int)
    chain = np.zeros((_GRID + 1, _GRID + 1))
    for state, targets in enumerate(landed):
        inside = targets[targets <= _GRID]
        np.add.at(chain[state], inside, 1 / n)
    return float(np.linalg.solve(np.eye(_GRID + 1) - chain, np.ones(_GRID + 1))[0])
