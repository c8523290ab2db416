"""elbo_loss and expansion_distances on the CUDA kernels. Their backward passes are composed of torch calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from ..composed.elbo_loss import elbo_loss_backward
from ..composed.expansion_distances import expansion_distances_backward
from .runtime import TYPES, Runtime, current

__all__ = ["elbo_loss", "elbo_loss_backward", "expansion_distances", "expansion_distances_backward", "refuse"]


class Layer(ctypes.Structure):
    """LevitLayer."""

    _fields_ = [("weights", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32)]


class Call(ctypes.Structure):
    """LevitVae."""

    _fields_ = [
        ("images", c_void_p),
        ("layers", Layer * 7),
        *((name, c_void_p) for name in ("noise", "query", "out", "partial")),
        ("batch", c_int64),
        *((name, c_int32) for name in ("experts", "latent", "codes")),
        ("beta", c_float),
        *((name, c_int32) for name in ("type", "processors", "shared_bytes")),
    ]


def elbo_loss(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float,
    noise: torch.Tensor | None,
) -> torch.Tensor:
    """See levit_kernels.elbo_loss."""
    runtime = current()
    images, noise, *weights = _dense(images, noise, *encoder, *decoder)
    call = _call(runtime, images, weights, noise)
    call.beta, call.codes = beta, 1 if noise is None else len(noise)
    out = images.new_empty(call.batch, call.experts, dtype=torch.float32)
    call.out = runtime.result(out)
    runtime.start("levit_elbo_loss", call, images.device)
    return out


def expansion_distances(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """See levit_kernels.expansion_distances."""
    runtime = current()
    images, noise, query, *weights = _dense(images, noise, query, *encoder)
    call = _call(runtime, images, weights, noise)
    call.query = runtime.source(query)
    partials = runtime.library.levit_expansion_distances_partials(ctypes.byref(call))
    partial = images.new_empty(call.experts, partials, dtype=torch.float32)
    out = images.new_empty(call.experts, dtype=torch.float32)
    call.partial, call.out = runtime.result(partial), runtime.result(out)
    runtime.start("levit_expansion_distances", call, images.device)
    return out


def refuse(op: str, args: tuple) -> str | None:
    """Why no kernel holds a call, or None."""
    if op.endswith("_backward"):
        return None
    runtime, images, encoder = current(), args[0], args[1]
    call = _sizes(runtime, images, [*encoder, *args[2]] if op == "elbo_loss" else encoder)
    call.query = 1 if op == "expansion_distances" else None  # which of the two it is; nothing is read
    sizes = ", ".join(str(layer.outputs) for layer in call.layers)
    return None if runtime.library.levit_vae_fits(ctypes.byref(call)) else f"no block can hold layers of {sizes}"


def _dense(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _sizes(runtime: Runtime, images: torch.Tensor, weights: Sequence[torch.Tensor]) -> Call:
    call = Call(batch=len(images), experts=len(weights[0]), latent=weights[4].shape[2], codes=1)
    for i, matrix in enumerate(weights[::2]):
        call.layers[i] = Layer(None, None, *matrix.shape[1:])
    call.type = TYPES[images.dtype]
    call.processors, call.shared_bytes = runtime.gpu(images.device)
    return call


def _call(runtime: Runtime, images: torch.Tensor, weights: Sequence[torch.Tensor], noise: torch.Tensor | None) -> Call:
    call = _sizes(runtime, images, weights)
    call.images, call.noise = runtime.source(images), runtime.source(noise)
    for layer, matrix, bias in zip(call.layers, weights[::2], weights[1::2], strict=False):
        layer.weights, layer.bias = runtime.source(matrix), runtime.source(bias)
    return call
