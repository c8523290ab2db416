"""Gradients of task_attention: one launch recomputes attention and writes it and the gradient of the scores.

What remains are matrix products: composed/task_tokens_backward.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..composed.task_tokens_backward import backward
from .task_attention import Tokens, attend, load_tile, locate


@triton.jit
def _backward(
    query,
    own_key,
    own_value,
    keys,
    values,
    tokens,
    rows,
    patches,
    depth,
    scale,
    stride_oh,
    stride_ot,
    stride_kb,
    stride_kn,
    stride_kg,
    stride_kc,
    upstream,
    attention,
    by_scores,
    own_attention,
    by_own_scores,
    images,
    stride_uh,
    stride_ub,
    stride_ut,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """upstream [H,B,T,C], of the weighted sums -> attention [B,H,T,N], by_scores [H,T,B,N], and of the tokens
    themselves [H,T,B]; gradients of the scores before they were scaled. The rest is as in the forward kernel.
    """
    image, row, head, token, inside, offset, mine = locate(
        rows, tokens, stride_kb, stride_kg, stride_oh, stride_ot, ROWS
    )
    patch = tl.arange(0, BLOCK_N).to(tl.int64)
    own, weights = attend(
        query,
        own_key + mine,
        keys + offset,
        row,
        inside,
        patch,
        patches,
        depth,
        scale,
        stride_kn,
        stride_kc,
        BLOCK_C,
        PRECISION,
    )
    upstream += head * stride_uh + image * stride_ub + token * stride_ut
    by_own = tl.zeros((ROWS,), tl.float32)
    by_weights = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first in range(0, depth, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        read = inside[:, None] & (c < depth)[None, :]
        grad = tl.load(upstream[:, None] + c[None, :], mask=read, other=0)
        value = load_tile(values + offset, patch, patch < patches, c, depth, stride_kn, stride_kc)
        by_weights = tl.dot(grad, tl.trans(value), by_weights, input_precision=PRECISION)
        my_value = tl.load((own_value + mine)[:, None] + c[None, :], mask=read, other=0)
        by_own += tl.sum(grad.to(tl.float32) * my_value.to(tl.float32), 1)
    expected = own * by_own + tl.sum(weights * by_weights, 1)
    stored = inside[:, None] & (patch < patches)[None, :]
    every = tl.num_programs(2) * rows  # H * T
    where = (image * every + row)[:, None] * patches + patch[None, :]
    tl.store(attention + where, weights.to(attention.dtype.element_ty), mask=stored)
    where = (row * images + image)[:, None] * patches + patch[None, :]
    weights *= (by_weights - expected[:, None]) * scale
    tl.store(by_scores + where, weights.to(by_scores.dtype.element_ty), mask=stored)
    tl.store(own_attention + row * images + image, own, mask=inside)
    tl.store(by_own_scores + row * images + image, own * (by_own - expected) * scale, mask=inside)


class _Tokens(Tokens):
    """With the Triton kernel of the backward pass."""

    def attend_backward(self, keys: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        results = self.backward_results(keys)
        self.start(_backward, keys, values, grad, *results, len(keys), *grad.stride()[:3])
        return results


def task_attention_backward(
    grad: torch.Tensor,
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of the tensor arguments that `needs` names, in their order; nothing was saved, all is recomputed."""
    asked = _Tokens.of(patches, tokens, wq, wk, wv, num_heads, scale)
    return backward(asked, grad, tokens, patches, wq, wo, bo, needs)
