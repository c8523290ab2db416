"""Gaussian noise that is a function of where it is used, not of when it is drawn.

The ε of a frozen expert's code depends on (seed, expert, position in the stream) alone (SPEC.md, equation 6 [D]), so a
code stored when its image entered the memory equals one recomputed later, on any device, in any order, after a resume.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = (1 << 63) - 1


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
    component = torch.arange(latent_dim, device=positions.device)
    key = _hash(_hash(experts + _signed(seed * 0xA0761D6478BD642F))[:, None] + positions)
    key = key[:, :, None] + component * _signed(0xD1B54A32D192ED03)
    # 53 bits each, shifted by half a step away from 0, where the logarithm would be infinite.
    radius, angle = (((_hash(key + salt) >> 10).double() + 0.5) * 2.0**-53 for salt in (0, _signed(0x8CB92BA72F3D8DD7)))
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)


def fixed_noise(seed: int, draws: int, latent_dim: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """ε of routing, the same for every image and expert, so that a route cannot depend on the batch: [S, L]."""
    nowhere = torch.tensor([-1], device=device)
    return position_noise(seed, nowhere, torch.arange(draws, device=device), latent_dim, dtype)[0]


def _hash(x: Tensor) -> Tensor:
    """A step of splitmix64 on int64 (which wraps), to non-negative 63-bit integers."""
    x = x + _signed(0x9E3779B97F4A7C15)  # 0 is a fixed point of the rest
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) & _MASK


def _signed(x: int) -> int:
    """The two's complement value of the low 64 bits of x."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x
