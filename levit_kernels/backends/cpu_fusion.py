"""dkf_fuse through the native kernels, and which stores they read."""

from __future__ import annotations

import torch

from .. import gates as gating
from .._check import at_least_float32
from ..composed import dkf_fuse as composed_dkf_fuse

STORES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
)
"""What dkf_fuse has kernels for: dtype of the store, dtype of the sums."""


def dkf_fuse(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """See levit_kernels.dkf_fuse."""
    weights = gating.expand(gates).to(sums_dtype(features, gates))
    fused = torch.ops.levit_native.dkf_fuse(*dense_store(features, weights, index))
    return fused.to(torch.promote_types(features.dtype, gates.dtype))


def dkf_fuse_backward(
    grad: torch.Tensor,
    features: torch.Tensor,
    gates: torch.Tensor,
    index: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of features and gates, those that `needs` names."""
    grads = composed_dkf_fuse.dkf_fuse_backward(grad, features, gates, index, [True, False]) if needs[0] else []
    if needs[1]:
        stored, _, index = dense_store(features, gates, index)
        heads = gating.expand(gates).shape[2]
        by_gate = torch.ops.levit_native.dkf_fuse_gate_gradient(
            grad.to(sums_dtype(features, gates)), stored, index, heads
        )
        grads.append(gating.reduce_like(by_gate, gates))
    return grads


def dense_store(
    features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The store as the kernel reads it, each expert's [N, E] dense; another layout costs a copy of the rows used."""
    _, _, tokens, width = features.shape
    by_token, by_feature = features.stride()[2:]
    if (width == 1 or by_feature == 1) and (tokens == 1 or by_token == width):
        return features, gates, index
    rows = features if index is None else features[index]
    return rows.contiguous(), gates, None


def sums_dtype(features: torch.Tensor, gates: torch.Tensor) -> torch.dtype:
    """What the sums run in."""
    return at_least_float32(torch.promote_types(features.dtype, gates.dtype))
