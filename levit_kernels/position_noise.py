"""Gaussian noise that is a function of where it is used, not of when it is drawn: a counter-based generator."""

from __future__ import annotations

import math

import torch

from ._check import FLOATS
from .backends.registry import run_or

STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BY_SEED, BY_COMPONENT, BY_ANGLE = 0xA0761D6478BD642F, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7


def position_noise(
    positions: torch.Tensor, experts: torch.Tensor, latent_dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """epsilon of experts' codes for images at `positions` of the stream (equation 6 of SPEC.md, [D]).

    Each number is a hash of (seed, expert, position, component), made normal by the Box-Muller transform: the same on
    every device, in any order, after a resume.

    Args:
        positions: int64 `[M]`, 0-based.
        experts: int64 `[K]`, 0-based numbers, on the same device.
        latent_dim: L, components per code.
        seed: of the run.
        dtype: of the result; the numbers are made in float64 first.

    Returns:
        `[K,M,L]`, standard normal.

    Raises:
        ValueError: a shape, device or latent_dim; TypeError: a dtype.
    """
    for name, numbers in (("positions", positions), ("experts", experts)):
        if numbers.dtype != torch.int64:
            raise TypeError(f"position_noise: {name} must be int64, got {numbers.dtype}")
        if numbers.dim() != 1:
            raise ValueError(f"position_noise: {name} must have one dimension, got {list(numbers.shape)}")
    if experts.device != positions.device:
        raise ValueError(f"position_noise: experts must be on {positions.device} like positions, got {experts.device}")
    if latent_dim < 1:
        raise ValueError(f"position_noise: latent_dim must be at least 1, got {latent_dim}")
    if dtype not in FLOATS:
        raise TypeError(f"position_noise: dtype must be floating point, got {dtype}")
    return run_or(position_noise_reference, "position_noise", positions, experts, latent_dim, seed, dtype)


def position_noise_reference(
    positions: torch.Tensor, experts: torch.Tensor, latent_dim: int, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """The same in plain torch."""
    component = torch.arange(latent_dim, device=positions.device)
    key = _hash(_hash(experts + signed(seed * BY_SEED))[:, None] + positions)
    key = key[:, :, None] + component * signed(BY_COMPONENT)
    # 53 bits each, shifted by half a step away from 0, where the logarithm would be infinite
    radius, angle = (((_hash(key + salt) >> 10).double() + 0.5) * 2.0**-53 for salt in (0, signed(BY_ANGLE)))
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)


def signed(x: int) -> int:
    """The two's complement value of the low 64 bits of x."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _hash(x: torch.Tensor) -> torch.Tensor:
    """A step of splitmix64 on int64 (which wraps), to non-negative 63-bit integers."""
    x = x + signed(STEP)  # 0 is a fixed point of the rest
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(FIRST)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(SECOND)
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) & ((1 << 63) - 1)
