"""Gradients of task_attention around a kernel that recomputes attention, and writes it and the gradients of the scores.

What remains are matrix products, over all images at once where a gradient is a sum over images.
"""

from __future__ import annotations

import torch

from .linear import matmul
from .task_tokens import Tokens


def backward(
    asked: Tokens,
    grad: torch.Tensor,
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of the tensor arguments that `needs` names, in their order; nothing was saved, all is recomputed."""
    sums = _FoldedSums(asked, needs) if asked.folded else _ProjectedSums(asked, needs)
    by_wo, by_bo = (x.new_zeros(x.shape, dtype=torch.float32) for x in (wo, bo))
    by_patches = patches.new_empty(patches.shape) if needs[1] else None
    for part in asked.parts(patches):
        images, rows = patches[part], grad[part].flatten(0, 1)
        keys, values = asked.keys_and_values(images)
        mixed = asked.mix(keys, values) if needs[5] or (needs[4] and asked.folded) else None
        if needs[5]:
            by_wo += matmul(rows.t(), asked.join(mixed))
        if needs[6]:
            by_bo += rows.sum(0, dtype=torch.float32)
        if any(needs[:5]):
            by_heads = matmul(rows, wo).view(len(images), len(tokens), len(asked.query), -1).permute(2, 0, 1, 3)
            found = sums.add(images, keys, values, mixed, by_heads)
            if found is not None:
                by_patches[part] = found
    by_tokens, by_query, by_wk, by_wv = sums.total(tokens.float())
    by_query = by_query.transpose(0, 1).flatten(1)
    grads = (by_tokens + by_query @ wq.float(), by_patches, by_query.t() @ tokens.float(), by_wk, by_wv, by_wo, by_bo)
    return [x.to(patches.dtype) for x, need in zip(grads, needs, strict=True) if need]


class _Sums:
    """What gradients of tokens and weights add up to, part by part of the images, in float32."""

    def __init__(self, asked: Tokens, needs: list[bool]) -> None:
        self.asked = asked
        self.needs = needs
        like = asked.query
        self.by_query, self.by_own_key, self.by_own_value = (
            like.new_zeros(like.shape, dtype=torch.float32) for _ in range(3)
        )
        self.by_wk, self.by_wv = (w.new_zeros(w.shape, dtype=torch.float32) for w in (asked.wk, asked.wv))

    def attend_backward(
        self, keys: torch.Tensor, values: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> attention and gradient of the scores, as `Tokens.attend_backward`; takes in the tokens' own part."""
        attention, by_scores, own, by_own = self.asked.attend_backward(keys, values, grad)
        by_own = by_own.sum(2)[..., None]
        self.by_query += by_own * self.asked.own_key
        self.by_own_key += by_own * self.asked.query
        self.by_own_value += (own[:, :, None] @ grad.transpose(1, 2).float())[:, :, 0]
        return attention, by_scores


class _ProjectedSums(_Sums):
    def add(
        self,
        patches: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mixed: torch.Tensor | None,
        by_heads: torch.Tensor,
    ) -> torch.Tensor | None:
        """Takes in some images; by_heads `[H,b,T,d]`. Returns the gradient of the patches, if they need one."""
        query, needs, (images, length, heads, depth) = self.asked.query, self.needs, keys.shape
        attention, by_scores = self.attend_backward(keys, values, by_heads)
        by_scores = by_scores.flatten(2)
        self.by_query += torch.bmm(by_scores, keys.flatten(0, 1).transpose(0, 1))
        if not (needs[1] or needs[3] or needs[4]):
            return None
        by_key = keys.new_empty(images * length, heads, depth)
        torch.bmm(by_scores.transpose(1, 2), query, out=by_key.transpose(0, 1))
        by_key = by_key.view(images * length, -1)
        by_value = torch.bmm(attention.flatten(0, 1).transpose(1, 2), by_heads.transpose(0, 1).flatten(0, 1))
        by_value = by_value.view(images, heads, length, depth).transpose(1, 2).reshape(by_key.shape)
        rows = patches.flatten(0, 1)
        if needs[3]:
            self.by_wk += matmul(by_key.t(), rows).view_as(self.by_wk)
        if needs[4]:
            self.by_wv += matmul(by_value.t(), rows).view_as(self.by_wv)
        if not needs[1]:
            return None
        by_patches = matmul(by_key, self.asked.wk.flatten(0, 1))
        return torch.addmm(by_patches, by_value, self.asked.wv.flatten(0, 1)).view(patches.shape)

    def total(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> gradients of tokens `[T,D]` but for their queries, of these `[H,T,d]`, and of wk and wv."""
        by_key, by_value = (x.transpose(0, 1).flatten(1) for x in (self.by_own_key, self.by_own_value))
        wk, wv = (w.float().flatten(0, 1) for w in (self.asked.wk, self.asked.wv))
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
        by_heads: torch.Tensor,
    ) -> torch.Tensor | None:
        """As _ProjectedSums.add; mixed are the weighted sums `[H,b,T,D]`, where wv needs a gradient."""
        query, (heads, images, tokens, _) = self.asked.query, by_heads.shape
        rows = by_heads.flatten(1, 2)
        if self.needs[4]:
            self.by_wv += torch.bmm(rows.transpose(1, 2), mixed.flatten(1, 2))
        by_sums = torch.bmm(rows, self.asked.wv).view(heads, images, tokens, -1)
        attention, by_scores = self.attend_backward(keys, values, by_sums)
        by_scores = by_scores.view(heads * tokens, -1)
        self.by_query += matmul(by_scores, patches.flatten(0, 1)).view_as(query)
        if not self.needs[1]:
            return None
        through_scores = matmul(by_scores.t(), query.flatten(0, 1)).view(patches.shape)
        by_sums = by_sums.transpose(0, 1).flatten(1, 2)
        return torch.baddbmm(through_scores, attention.flatten(1, 2).transpose(1, 2), by_sums)

    def total(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As _ProjectedSums.total."""
        by_query = torch.bmm(self.by_query, self.asked.wk.float().transpose(1, 2))
        by_wk = torch.bmm(self.asked.plain_query.float().transpose(1, 2), self.by_query)
        by_tokens = (self.by_own_key + self.by_own_value).sum(0)
        return by_tokens, by_query, by_wk.flatten(0, 1), self.by_wv.flatten(0, 1)
