"""Gaussian noise that is a function of where it is used, not of when it is drawn.

The ε of a frozen expert's code depends on (seed, expert, position in the stream) alone (SPEC.md, equation 6 [D]), so a
code stored when its image entered the memory equals one recomputed later, on any device, in any order, after a resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levit_kernels.position_noise import position_noise_reference


def position_noise(
    seed: int, experts: Tensor, positions: Tensor, latent_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """ε of experts' codes for images at `positions` of the stream.

    A counter-based generator: each number is a hash of (seed, expert, position, component), made normal by the
    Box-Muller transform.

    Args:
        seed: the run's seed.
        experts: [K] int64, 0-based expert numbers.
        positions: [M] int64, 0-based positions in the stream, on the same device.
        latent_dim: L, components per code.
        dtype: of the result; the numbers are made in float64 first.

    Returns:
        [K, M, L], standard normal.
    """
    return position_noise_reference(positions, experts, latent_dim, seed, dtype)


def fixed_noise(seed: int, draws: int, latent_dim: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """ε of routing, the same for every image and expert, so that a route cannot depend on the batch: [S, L]."""
    nowhere = torch.tensor([-1], device=device)
    return position_noise(seed, nowhere, torch.arange(draws, device=device), latent_dim, dtype)[0]
