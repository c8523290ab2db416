"""Attention of frozen experts whose query and key maps were multiplied once, when they were frozen.

A score is (z Wq + bq)·(z' Wk + bk). What of it does not depend on the key's token z' adds the same to all scores of a
query and leaves the softmax as it is, so (z Wq Wkᵀ + bq Wkᵀ)·z' serves as well: one map of Q channels in place of two
of d, and the tokens themselves as keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import gates as gating
from ._check import Shapes, at_least_float32
from .backends.registry import backends, forced, run


class FoldedWeights(NamedTuple):
    """What `folded_attention` takes behind the patches."""

    w_embed: torch.Tensor
    """[K,P,Q], BatchNorm folded in"""
    b_embed: torch.Tensor
    """[K,Q]"""
    w_scores: torch.Tensor
    """[K,Q,H,Q]: Wq Wkᵀ of every head"""
    b_scores: torch.Tensor
    """[K,H,Q]: bq Wkᵀ"""
    w_values: torch.Tensor
    """[K,Q,H,d]"""
    b_values: torch.Tensor
    """[K,H,d]"""


def folding_pays(w_qkv: torch.Tensor) -> bool:
    """Whether one map of Q channels costs less than two of d, and the backend in charge has a kernel for it.

    `w_qkv` is `[K,Q,3,H,d]`, as of `expert_attention`.
    """
    native = backends()["cpu"].can_run("folded_attention", (w_qkv, w_qkv)) and forced() in (None, "cpu")
    return native and w_qkv.shape[1] < 2 * w_qkv.shape[-1]


def folded_scores(w_qkv: torch.Tensor, b_qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w_scores `[K,Q,H,Q]` and b_scores `[K,H,Q]` of w_qkv `[K,Q,3,H,d]`, b_qkv `[K,3,H,d]`, summed in float64."""
    query, key, _ = w_qkv.double().unbind(2)
    w_scores = torch.einsum("kihd,kohd->kiho", query, key)
    b_scores = torch.einsum("khd,kohd->kho", b_qkv[:, 0].double(), key)
    return w_scores.to(w_qkv.dtype), b_scores.to(b_qkv.dtype)


def folded_attention(
    patches: torch.Tensor,
    weights: FoldedWeights,
    gates: torch.Tensor | None = None,
    negative_slope: float = 0.2,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`levit_kernels.expert_attention` from folded weights. There are no gradients: call it under `no_grad`.

    Args:
        patches: `[B,N,P]`.
        weights: of K experts, all of the patches' dtype.
        gates, negative_slope: as of `expert_attention`.
        out: where to write the result without gates, `[K,B,N,H*d]` of the patches' dtype; experts and images may have
            any strides, so that the outputs can go straight to where they are kept. Default: a new tensor.

    Returns:
        As `expert_attention`: `[K,B,N,H*d]`, or with gates their gated sum `[B,N,H*d]`; `out` if it was given.

    Raises:
        ValueError: a shape, device or slope; TypeError: a dtype.
    """
    shapes = Shapes("folded_attention")
    shapes.match("patches", patches, "B N P")
    for (name, tensor), pattern in zip(weights._asdict().items(), _PATTERNS, strict=True):
        shapes.match(name, tensor, pattern)
    if gates is not None:
        gating.check_gates(shapes, gates)
    if not 0 <= negative_slope < math.inf:
        raise ValueError(f"folded_attention: negative_slope must be finite and >= 0, got {negative_slope}")
    if out is not None:
        if gates is not None:
            raise ValueError("folded_attention: out must be None where gates are given")
        shapes.match("out", out, "K B N E")
        sizes = (len(weights.b_values), *patches.shape[:2], weights.b_values[0].numel())
        if out.shape != sizes or (out.numel() and not out[0, 0].is_contiguous()):
            raise ValueError(
                f"folded_attention: out must be {list(sizes)}, dense in tokens and channels; "
                f"got {list(out.shape)} with strides {out.stride()}"
            )
    found = run("folded_attention", patches, weights, gates, negative_slope, out)
    return found if out is None else out


_PATTERNS = ("K P Q", "K Q", "K Q H Q", "K H Q", "K Q H d", "K H d")


def folded_attention_reference(
    patches: torch.Tensor,
    weights: FoldedWeights,
    gates: torch.Tensor | None = None,
    negative_slope: float = 0.2,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch."""
    w_embed, b_embed, w_scores, b_scores, w_values, b_values = weights
    embedded = torch.einsum("bnp,kpq->kbnq", patches, w_embed) + b_embed[:, None, None]
    tokens = F.leaky_relu(embedded, negative_slope)
    query = torch.einsum("kbni,kiho->khbno", tokens, w_scores) + b_scores[:, :, None, None]
    value = torch.einsum("kbni,kihd->khbnd", tokens, w_values) + b_values[:, :, None, None]
    scores = query @ tokens[:, None].transpose(-1, -2) / math.sqrt(value.shape[-1])
    attention = torch.softmax(scores, -1, dtype=at_least_float32(scores.dtype)).to(scores.dtype)
    outputs = (attention @ value).permute(0, 2, 3, 1, 4).flatten(3)
    fused = outputs if gates is None else gating.gated_sum(outputs.transpose(0, 1), gates)
    return fused if out is None else out.copy_(fused)
