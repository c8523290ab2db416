"""Gradients of task_attention: a kernel recomputes attention and writes it and the gradients of the scores.

What remains are matrix products, over all images at once where a gradient is a sum over images.
"""

from __future__ import annotations

import torch

from ..composed.linear import matmul
from .task_attention import Tokens, refuse, tokens_for

__all__ = ["refuse", "task_attention_backward"]


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
    asked = tokens_for(patches, tokens, wq, wk, wv, num_heads, scale)
    sums = _Sums(asked, needs)
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
        if not any(needs[:5]):
            continue
        by_heads = matmul(rows, wo).view(len(images), len(tokens), num_heads, -1).permute(2, 0, 1, 3)
        add = sums.add_folded if asked.folded else sums.add_projected
        found = add(images, keys, values, mixed, by_heads)
        if by_patches is not None:
            by_patches[part] = found
    by_tokens, by_query, by_wk, by_wv = sums.of_tokens(tokens.float())
    grads = (by_tokens + by_query @ wq.float(), by_patches, by_query.t() @ tokens.float(), by_wk, by_wv, by_wo, by_bo)
    return [x.to(patches.dtype) for x, need in zip(grads, needs, strict=True) if need]


class _Sums:
    """What gradients of tokens and weights add up to, part by part of the images, in float32."""

    def __init__(self, asked: Tokens, needs: list[bool]) -> None:
        self.asked = asked
        self.by_patches, self.wants_wk, self.wants_wv = needs[1], needs[3], needs[4]
        like = asked.query
        self.by_query, self.by_own_key, self.by_own_value = (
            like.new_zeros(like.shape, dtype=torch.float32) for _ in range(3)
        )
        self.by_wk, self.by_wv = (w.new_zeros(w.shape, dtype=torch.float32) for w in (asked.wk, asked.wv))

    def add_projected(
        self,
        patches: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mixed: torch.Tensor | None,
        by_heads: torch.Tensor,
    ) -> torch.Tensor | None:
        """Takes in some images; by_heads `[H,b,T,d]`. Returns the gradient of the patches, if they need one."""
        images, length, heads, depth = keys.shape
        attention, by_scores = self._attend_backward(keys, values, by_heads)
        by_scores = by_scores.flatten(2)
        self.by_query += torch.bmm(by_scores, keys.flatten(0, 1).transpose(0, 1))
        rows, wk, wv = (x.flatten(0, 1) for x in (patches, self.asked.wk, self.asked.wv))
        by_key = torch.bmm(by_scores.transpose(1, 2), self.asked.query).transpose(0, 1).flatten(1)
        by_value = attention.transpose(2, 3) @ by_heads.transpose(0, 1)  # [b,H,N,d]
        by_value = by_value.transpose(1, 2).reshape(images * length, heads * depth)
        if self.wants_wk:
            self.by_wk += matmul(by_key.t(), rows).view_as(self.by_wk)
        if self.wants_wv:
            self.by_wv += matmul(by_value.t(), rows).view_as(self.by_wv)
        return matmul(by_key, wk).addmm_(by_value, wv).view(patches.shape) if self.by_patches else None

    def add_folded(
        self,
        patches: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mixed: torch.Tensor | None,
        by_heads: torch.Tensor,
    ) -> torch.Tensor | None:
        """As add_projected; mixed are the weighted sums `[H,b,T,D]`, where wv needs a gradient."""
        query, rows = self.asked.query, by_heads.flatten(1, 2)
        if self.wants_wv:
            self.by_wv += torch.bmm(rows.transpose(1, 2), mixed.flatten(1, 2))
        by_sums = torch.bmm(rows, self.asked.wv).unflatten(1, by_heads.shape[1:3])
        attention, by_scores = self._attend_backward(keys, values, by_sums)
        by_scores = by_scores.flatten(0, 1).flatten(1)
        self.by_query += matmul(by_scores, patches.flatten(0, 1)).view_as(query)
        if not self.by_patches:
            return None
        through_scores = matmul(by_scores.t(), query.flatten(0, 1)).view(patches.shape)
        by_sums = by_sums.transpose(0, 1).flatten(1, 2)
        return torch.baddbmm(through_scores, attention.flatten(1, 2).transpose(1, 2), by_sums)

    def of_tokens(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> gradients of tokens `[T,D]` but for their queries, of these `[T,D]`, and of wk and wv."""
        asked, by_query, by_wk, by_wv = self.asked, self.by_query, self.by_wk, self.by_wv
        if asked.folded:
            by_wk = torch.bmm(asked.plain_query.float().transpose(1, 2), by_query)
            by_query = torch.bmm(by_query, asked.wk.float().transpose(1, 2))
            by_tokens = (self.by_own_key + self.by_own_value).sum(0)
            return by_tokens, _joined(by_query), by_wk.flatten(0, 1), by_wv.flatten(0, 1)
        by_key, by_value = _joined(self.by_own_key), _joined(self.by_own_value)
        by_tokens = by_key @ asked.wk.flatten(0, 1).float() + by_value @ asked.wv.flatten(0, 1).float()
        by_wk, by_wv = by_wk.flatten(0, 1) + by_key.t() @ tokens, by_wv.flatten(0, 1) + by_value.t() @ tokens
        return by_tokens, _joined(by_query), by_wk, by_wv

    def _attend_backward(
        self, keys: torch.Tensor, values: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> attention and gradient of the scores; takes in what tokens have of themselves."""
        asked = self.asked
        attention, by_scores, own, by_own = asked.attend_backward(keys, values, grad)
        by_own = by_own.sum(2)[..., None]
        self.by_query += by_own * asked.own_key
        self.by_own_key += by_own * asked.query
        self.by_own_value += (own[:, :, None] @ grad.transpose(1, 2).float())[:, :, 0]
        return attention, by_scores


def _joined(x: torch.Tensor) -> torch.Tensor:
    """`[H,T,d]` -> `[T,D]`"""
    return x.transpose(0, 1).flatten(1)
