"""The native CPU kernels (csrc/cpu) as a backend; gradients are the composed ones."""

from __future__ import annotations

import functools

import torch

from .. import native
from ..composed.latent_distance import latent_distance_backward
from .registry import Backend, device_of

OPS = {
    "latent_distance": lambda codes, query: torch.ops.levit_native.latent_distance(codes, query),
    "latent_distance_backward": latent_distance_backward,
}


@functools.cache
def unavailable() -> str | None:
    """Why no native kernel can run in this process, or None. Loads the library to find out."""
    ok, reason = native.available()
    return None if ok else reason


def refuse(op: str, args: tuple) -> str | None:
    """Why the native kernels do not take a call."""
    if device_of(args).type != "cpu":
        return f"the tensors are on {device_of(args)}"
    for x in args:
        if isinstance(x, torch.Tensor) and x.dtype not in (torch.float32, torch.float64):
            return f"takes float32 and float64, got {x.dtype}"
    return None


BACKEND = Backend("cpu", OPS, refuse, unavailable)
