"""latent_distance on the CUDA kernels, forward and backward."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch

from .runtime import TYPES, current


class Call(ctypes.Structure):
    """LevitLatentDistance."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes", "query")),
        ("samples", c_int64),
        *((name, c_int32) for name in ("experts", "latent", "type")),
        *((name, c_void_p) for name in ("partial", "out", "grad", "by_codes", "by_query")),
    ]


def latent_distance(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """See levit_kernels.latent_distance."""
    runtime, codes, query = current(), codes.contiguous(), query.contiguous()
    experts, samples, latent = codes.shape
    call = Call(runtime.source(codes), runtime.source(query), samples, experts, latent, TYPES[codes.dtype])
    partials = runtime.library.levit_latent_distance_partials(samples)
    partial = codes.new_empty(experts, partials, dtype=torch.float32)
    out = codes.new_empty(experts, dtype=torch.float32)
    call.partial, call.out = runtime.result(partial), runtime.result(out)
    runtime.start("levit_latent_distance", call, codes.device)
    return out


def latent_distance_backward(
    grad: torch.Tensor, codes: torch.Tensor, query: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor]:
    """The unit vectors from query to codes, weighted by grad / M; zero where they coincide."""
    runtime, codes, query, grad = current(), codes.contiguous(), query.contiguous(), grad.float().contiguous()
    experts, samples, latent = codes.shape
    call = Call(runtime.source(codes), runtime.source(query), samples, experts, latent, TYPES[codes.dtype])
    by_codes, by_query = (torch.empty_like(x) if need else None for x, need in zip((codes, query), needs, strict=True))
    call.grad = runtime.source(grad)
    call.by_codes, call.by_query = runtime.result(by_codes), runtime.result(by_query)
    runtime.start("levit_latent_distance_backward", call, codes.device)
    return [x for x in (by_codes, by_query) if x is not None]


def refuse(op: str, args: tuple) -> str | None:
    """Why no kernel holds a call, or None: all sizes do."""
    return None
