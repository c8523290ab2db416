"""When to grow: the expansion rules. A rule looks at the memory and says whether the active expert is finished."""

from __future__ import annotations

from torch import Tensor


def latent_rule(distances: Tensor, threshold: float) -> bool:
    """Rule `latent`, equation 6 [P]: expand when every frozen VAE's codes lie further than γ from the active one's.

    Args:
        distances: D [K-1], K ≥ 2.
        threshold: γ.
    """
    return bool(distances.min() > threshold)
