"""When to grow: the expansion rules. A rule looks at the memory and says whether the active expert is finished."""

from __future__ import annotations

from torch import Tensor


def rule_fires(statistic: Tensor, threshold: float) -> bool:
    """Both published rules: expand when the memory is far from every frozen expert.

    Args:
        statistic: per frozen expert [K-1], K ≥ 2: D of equation 6 for rule `latent` [P], the memory's mean
            reconstruction error for rule `energy` [C].
        threshold: γ, or the configuration's `energy_threshold`.
    """
    return bool(statistic.min() > threshold)
