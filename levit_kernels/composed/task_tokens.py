"""task_attention around a kernel: torch computes what is one large matrix product, the kernel all that lies between.

The kernel serves both forms that `folds` chooses from:

- Projected: G = H groups of T queries, against keys and values of C = d columns that a product made of the patches.
- Folded: one group of H*T queries that went through W_k, against the patches themselves, C = D; W_v follows.

In both a token is one more key and value for its own query, so the kernel need not know which form it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .linear import matmul
from .task_attention import tiles
from .task_forms import folds

SCRATCH_BYTES = 256 << 20  # of keys, values and weighted sums at a time


@dataclass(frozen=True)
class Tokens:
    """What tokens bring to every image, and what images must bring to them; a backend's subclass has the kernels."""

    folded: bool
    plain_query: torch.Tensor
    """`[H,T,d]`"""
    query: torch.Tensor
    """`[H,T,C]`"""
    own_key: torch.Tensor
    """`[H,T,C]`; where folded the tokens themselves, for every head the same."""
    own_value: torch.Tensor
    """`[H,T,C]`, as own_key."""
    wk: torch.Tensor
    wv: torch.Tensor
    """Of the heads, `[H,d,D]`, as wk."""
    scale: float

    def attend(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """The kernel of the forward pass: the sums of values and the own ones by attention, into out `[H,b,T,C]`."""
        raise NotImplementedError

    def attend_backward(self, keys: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        """The kernel of the backward pass; gradients are of scores before they were scaled.

        grad is `[H,b,T,C]`, of the sums. Returns attention `[b,H,T,N]` and the gradient of the scores `[H,T,b,N]`, then
        both for the tokens with themselves, `[H,T,b]` in float32.
        """
        raise NotImplementedError

    @classmethod
    def of(
        cls,
        patches: torch.Tensor,
        tokens: torch.Tensor,
        wq: torch.Tensor,
        wk: torch.Tensor,
        wv: torch.Tensor,
        num_heads: int,
        scale: float | None,
    ) -> Tokens:
        """What one call asks of all its images."""
        depth = tokens.shape[1] // num_heads
        scale = depth**-0.5 if scale is None else scale
        query = _by_head(matmul(tokens, wq.t()), num_heads)
        heads_of = [w.unflatten(0, (num_heads, depth)) for w in (wk, wv)]
        if not folds(num_heads, len(tokens), depth, patches.shape[1]):
            key, value = (_by_head(matmul(tokens, w.t()), num_heads) for w in (wk, wv))
            return cls(False, query, query, key, value, *heads_of, scale)
        own = tokens.contiguous().expand(num_heads, -1, -1)
        return cls(True, query, torch.bmm(query, heads_of[0]), own, own, *heads_of, scale)

    def parts(self, patches: torch.Tensor) -> Iterator[slice]:
        """Images that need no more than SCRATCH_BYTES."""
        (heads, tokens, depth), length = self.query.shape, patches.shape[1]
        numbers = 2 * heads * depth * (tokens if self.folded else length) + 2 * heads * tokens * length
        return tiles(patches, numbers, SCRATCH_BYTES)

    def keys_and_values(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """patches `[b,N,D]` -> twice `[b,N,G,C]`, of the same strides."""
        if self.folded:
            return patches[:, :, None], patches[:, :, None]
        rows, shape = patches.flatten(0, 1), (*patches.shape[:2], len(self.query), -1)
        keys, values = (matmul(rows, w.flatten(0, 1).t()).view(shape) for w in (self.wk, self.wv))
        return keys, values

    def mix(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The sums of values and the own ones by attention, `[H,b,T,C]`, as `join` wants them in memory."""
        (heads, tokens, depth), images = self.query.shape, len(keys)
        if self.folded:
            out = keys.new_empty(heads, images, tokens, depth)
        else:
            out = keys.new_empty(images, tokens, heads, depth).permute(2, 0, 1, 3)
        self.attend(keys, values, out)
        return out

    def backward_results(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """Room for what `attend_backward` returns."""
        (heads, tokens, _), (images, length) = self.query.shape, keys.shape[:2]
        results = [keys.new_empty(images, heads, tokens, length), keys.new_empty(heads, tokens, images, length)]
        return results + [keys.new_empty(heads, tokens, images, dtype=torch.float32) for _ in range(2)]

    def join(self, mixed: torch.Tensor) -> torch.Tensor:
        """What `mix` returned -> the heads' outputs side by side, `[b*T,D]`."""
        heads, images, tokens, _ = mixed.shape
        if not self.folded:
            return mixed.permute(1, 2, 0, 3).view(images * tokens, -1)
        out = mixed.new_empty(images * tokens, heads, self.wv.shape[1])
        torch.bmm(mixed.flatten(1, 2), self.wv.transpose(1, 2), out=out.transpose(0, 1))
        return out.view(images * tokens, -1)


def forward(asked: Tokens, patches: torch.Tensor, wo: torch.Tensor, bo: torch.Tensor) -> torch.Tensor:
    """What levit_kernels.task_attention returns, `[B,T,D]`."""
    heads = [asked.join(asked.mix(*asked.keys_and_values(patches[part]))) for part in asked.parts(patches)]
    rows = heads[0] if len(heads) == 1 else torch.cat(heads)
    return matmul(rows, wo.t(), bo).view(len(patches), asked.query.shape[1], -1)


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[T,D]` -> `[H,T,d]`, dense."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1).contiguous()
