"""dkf_fuse on the CUDA kernels, forward and backward."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch

from ..gates import reduce_like
from .runtime import TYPES, Gates, Runtime, current


class Call(ctypes.Structure):
    """LevitDkfFuse."""

    _fields_ = [
        ("features", c_void_p),
        *((name, c_int64) for name in ("per_row", "per_expert")),
        ("gates", Gates),
        ("index", c_void_p),
        *((name, c_int64) for name in ("rows", "batch")),
        *((name, c_int32) for name in ("experts", "tokens", "width", "heads", "type", "out_type")),
        *((name, c_void_p) for name in ("out", "grad", "by_gates", "by_features")),
    ]


def dkf_fuse(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """See levit_kernels.dkf_fuse."""
    runtime, kept = current(), _arguments(features, gates, index)
    call, dtype = _call(runtime, *kept, gates)
    out = features.new_empty(call.batch, call.tokens, call.width, dtype=dtype)
    call.out = runtime.result(out)
    runtime.start("levit_dkf_fuse", call, features.device)
    return out


def dkf_fuse_backward(
    grad: torch.Tensor,
    features: torch.Tensor,
    gates: torch.Tensor,
    index: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of features and gates, those that `needs` names."""
    runtime, kept, grad = current(), _arguments(features, gates, index), grad.contiguous()
    call, _ = _call(runtime, *kept, gates)
    by_features = features.new_empty(features.shape) if needs[0] else None
    by_gates = kept[1].new_empty(call.batch, call.experts, call.heads) if needs[1] else None
    call.grad = runtime.source(grad)
    call.by_features, call.by_gates = runtime.result(by_features), runtime.result(by_gates)
    runtime.start("levit_dkf_fuse_backward", call, features.device)
    grads = [by_features] if needs[0] else []
    return [*grads, reduce_like(by_gates, gates)] if needs[1] else grads


def refuse(op: str, args: tuple) -> str | None:
    """Why no kernel holds a call, or None: all sizes do."""
    return None


def _arguments(
    features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As the kernels read them: a store lies where it is as long as each expert's [N, E] is dense."""
    if not features[0, 0].is_contiguous():
        features = features.contiguous()
    return features, gates.float(), None if index is None else index.contiguous()


def _call(
    runtime: Runtime, features: torch.Tensor, wide: torch.Tensor, index: torch.Tensor | None, gates: torch.Tensor
) -> tuple[Call, torch.dtype]:
    dtype = torch.promote_types(features.dtype, gates.dtype)
    call = Call(runtime.source(features), *features.stride()[:2], runtime.gates(wide), runtime.source(index))
    call.rows, call.experts, call.tokens, call.width = features.shape
    call.batch = len(features if index is None else index)
    call.heads = gates.shape[-1] if gates.ndim > 1 else 1
    call.type, call.out_type = TYPES[features.dtype], TYPES[dtype]
    return call, dtype
