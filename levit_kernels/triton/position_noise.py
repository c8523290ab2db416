"""position_noise: seventy small operators of integers as one kernel."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..position_noise import BY_ANGLE, BY_COMPONENT, BY_SEED, FIRST, SECOND, STEP, signed
from .launch import ceil_div, launch

_STEP, _FIRST, _SECOND = (tl.constexpr(signed(x)) for x in (STEP, FIRST, SECOND))
_BY_COMPONENT, _BY_ANGLE = tl.constexpr(signed(BY_COMPONENT)), tl.constexpr(signed(BY_ANGLE))
_TURN, _ULP = tl.constexpr(2 * math.pi), tl.constexpr(2.0**-53)
BLOCK = 256


@triton.jit
def _hash(x):
    """A step of splitmix64 on int64 (which wraps), to non-negative 63-bit integers."""
    x = x + _STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def _uniform(key):
    """53 bits, shifted by half a step away from 0, where the logarithm would be infinite."""
    return ((_hash(key) >> 10).to(tl.float64) + 0.5) * _ULP


@triton.jit
def _cosine(turns):
    """cos(2 pi turns), 0 <= turns <= 1, by its series and the sine's; the library's keeps a table in local memory."""
    quarter = tl.floor(turns * 4 + 0.5)
    x = (turns - quarter * 0.25) * _TURN
    y = x * x
    cosine = y * (1 / 20922789888000) - 1 / 87178291200
    cosine = y * (y * (y * cosine + 1 / 479001600) - 1 / 3628800) + 1 / 40320
    cosine = y * (y * (y * (y * cosine - 1 / 720) + 1 / 24) - 0.5) + 1
    sine = y * (1 / 355687428096000) - 1 / 1307674368000
    sine = y * (y * (y * sine + 1 / 6227020800) - 1 / 39916800) + 1 / 362880
    sine = x * (y * (y * (y * (y * sine - 1 / 5040) + 1 / 120) - 1 / 6) + 1)
    q = quarter.to(tl.int32)
    value = tl.where((q & 1) == 0, cosine, sine)
    return tl.where((q == 1) | (q == 2), -value, value)


@triton.jit
def _noise(positions, experts, out, images, latent, numbers, seed, stride_m, stride_k, BLOCK: tl.constexpr):
    """out [K, images, latent]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numbers
    row = i // latent
    expert = tl.load(experts + (row // images) * stride_k, mask=inside, other=0)
    position = tl.load(positions + (row % images) * stride_m, mask=inside, other=0)
    key = _hash(_hash(expert + seed) + position) + (i % latent) * _BY_COMPONENT
    normal = tl.sqrt(-2 * tl.log(_uniform(key))) * _cosine(_uniform(key + _BY_ANGLE))
    tl.store(out + i, normal.to(out.dtype.element_ty), mask=inside)


def too_large(op: str, args: tuple) -> None:
    """Nothing is."""


def position_noise(
    positions: torch.Tensor, experts: torch.Tensor, latent_dim: int, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """See levit_kernels.position_noise."""
    out = positions.new_empty(len(experts), len(positions), latent_dim, dtype=dtype)
    launch(
        _noise,
        (ceil_div(out.numel(), BLOCK),),
        *(positions, experts, out, len(positions), latent_dim, out.numel(), signed(seed * BY_SEED)),
        *(*positions.stride(), *experts.stride()),
        BLOCK=BLOCK,
        threads=128,
        sanitize_overflow=False,
    )
    return out
