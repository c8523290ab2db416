"""Gradients of task_attention: one launch recomputes attention and writes it and the gradient of the scores.

What remains are matrix products, over all images at once where a gradient is a sum over images.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..composed.linear import matmul
from .task_attention import Tokens, attend, load_tile, locate, tokens_for


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


class _Sums:
    """What gradients of tokens and weights add up to, part by part of the images, in float32."""

    def __init__(self, asking: Tokens) -> None:
        self.asking = asking
        like = asking.query
        self.by_query, self.by_own_key, self.by_own_value = (
            like.new_zeros(like.shape, dtype=torch.float32) for _ in range(3)
        )
        self.by_wk, self.by_wv = (w.new_zeros(w.shape, dtype=torch.float32) for w in (asking.wk, asking.wv))

    def attend_backward(
        self, keys: torch.Tensor, values: torch.Tensor, upstream: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """upstream `[H,b,T,C]` -> attention `[b,H,T,N]`, gradient of the scores `[H,T,b,N]`; adds the own part."""
        asking, (heads, tokens, _), (images, length) = self.asking, self.asking.query.shape, keys.shape[:2]
        attention = keys.new_empty(images, heads, tokens, length)
        by_scores = keys.new_empty(heads, tokens, images, length)
        own, by_own = (keys.new_empty(heads, tokens, images, dtype=torch.float32) for _ in range(2))
        results = (attention, by_scores, own, by_own)
        asking.start(_backward, keys, values, upstream, *results, images, *upstream.stride()[:3])
        by_own = by_own.sum(2)[..., None]
        self.by_query += by_own * asking.own_key
        self.by_own_key += by_own * asking.query
        self.by_own_value += (own[..., None] * upstream.transpose(1, 2)).sum(2)
        return attention, by_scores


class _ProjectedSums(_Sums):
    def add(
        self,
        patches: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mixed: torch.Tensor | None,
        upstream: torch.Tensor,
        needs: list[bool],
    ) -> torch.Tensor | None:
        """Takes in some images; upstream `[H,b,T,d]`. Returns the gradient of the patches, if they need one."""
        query, (images, length, heads, depth) = self.asking.query, keys.shape
        attention, by_scores = self.attend_backward(keys, values, upstream)
        by_scores = by_scores.flatten(2)
        self.by_query += torch.bmm(by_scores, keys.flatten(0, 1).transpose(0, 1))
        if not (needs[1] or needs[3] or needs[4]):
            return None
        by_key = keys.new_empty(images * length, heads, depth)
        torch.bmm(by_scores.transpose(1, 2), query, out=by_key.transpose(0, 1))
        by_key = by_key.view(images * length, -1)
        by_value = torch.bmm(attention.flatten(0, 1).transpose(1, 2), upstream.transpose(0, 1).flatten(0, 1))
        by_value = by_value.view(images, heads, length, depth).transpose(1, 2).reshape(by_key.shape)
        rows = patches.flatten(0, 1)
        if needs[3]:
            self.by_wk += matmul(by_key.t(), rows).view_as(self.by_wk)
        if needs[4]:
            self.by_wv += matmul(by_value.t(), rows).view_as(self.by_wv)
        if not needs[1]:
            return None
        by_patches = matmul(by_key, self.asking.wk.flatten(0, 1))
        return torch.addmm(by_patches, by_value, self.asking.wv.flatten(0, 1)).view(patches.shape)

    def total(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> gradients of tokens `[T,D]` but for their queries, of these `[H,T,d]`, and of wk and wv."""
        by_key, by_value = (x.transpose(0, 1).flatten(1) for x in (self.by_own_key, self.by_own_value))
        wk, wv = (w.float().flatten(0, 1) for w in (self.asking.wk, self.asking.wv))
        by_wk, by_wv = self.by_wk.flatten(0, 1), self.by_wv.flatten(0, 1)
        by_tokens = by_key @ wk + by_value @ wv
        return by_tokens, self.by_query, by_wk + by_key.t() @ tokens, by_wv + by_value.t() @ tokens


class _FoldedSums(_Sums):
    def add(
        self,
        patches: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mixed: torch.Tensor | None,
        upstream: torch.Tensor,
        needs: list[bool],
    ) -> torch.Tensor | None:
        """As _ProjectedSums.add; mixed are the weighted sums `[H,b,T,D]`, where wv needs a gradient."""
        query, (heads, images, tokens, _) = self.asking.query, upstream.shape
        by_heads = upstream.flatten(1, 2)
        if needs[4]:
            self.by_wv += torch.bmm(by_heads.transpose(1, 2), mixed.flatten(1, 2))
        by_sums = torch.bmm(by_heads, self.asking.wv).view(heads, images, tokens, -1)
        attention, by_scores = self.attend_backward(keys, values, by_sums)
        by_scores = by_scores.view(heads * tokens, -1)
        self.by_query += matmul(by_scores, patches.flatten(0, 1)).view_as(query)
        if not needs[1]:
            return None
        through_scores = matmul(by_scores.t(), query.flatten(0, 1)).view(patches.shape)
        by_sums = by_sums.transpose(0, 1).flatten(1, 2)
        return torch.baddbmm(through_scores, attention.flatten(1, 2).transpose(1, 2), by_sums)

    def total(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As _ProjectedSums.total."""
        by_query = torch.bmm(self.by_query, self.asking.wk.float().transpose(1, 2))
        by_wk = torch.bmm(self.asking.plain_query.float().transpose(1, 2), self.by_query)
        by_tokens = (self.by_own_key + self.by_own_value).sum(0)
        return by_tokens, by_query, by_wk.flatten(0, 1), self.by_wv.flatten(0, 1)


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
    asking = tokens_for(patches, tokens, wq, wk, wv, num_heads, scale)
    sums = _FoldedSums(asking) if asking.folded else _ProjectedSums(asking)
    by_wo, by_bo = (x.new_zeros(x.shape, dtype=torch.float32) for x in (wo, bo))
    by_patches = patches.new_empty(patches.shape) if needs[1] else None
    for part in asking.tiles(patches):
        tile, rows = patches[part], grad[part].flatten(0, 1)
        keys, values = asking.keys_and_values(tile)
        mixed = asking.mix(keys, values) if needs[5] or (needs[4] and asking.folded) else None
        if needs[5]:
            by_wo += matmul(rows.t(), asking.join(mixed))
        if needs[6]:
            by_bo += rows.sum(0, dtype=torch.float32)
        if any(needs[:5]):
            upstream = matmul(rows, wo).view(len(tile), len(tokens), num_heads, -1).permute(2, 0, 1, 3)
            found = sums.add(tile, keys, values, mixed, upstream, needs)
            if found is not None:
                by_patches[part] = found
    by_tokens, by_query, by_wk, by_wv = sums.total(tokens.float())
    by_query = by_query.transpose(0, 1).flatten(1)
    grads = (by_tokens + by_query @ wq.float(), by_patches, by_query.t() @ tokens.float(), by_wk, by_wv, by_wo, by_bo)
    return [x.to(patches.dtype) for x, need in zip(grads, needs, strict=True) if need]
