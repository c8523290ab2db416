"""The two ways in which task tokens meet the patches of a tile of images; `folds` says which takes fewer operations.

Projected: keys and values of the patches, once for all tokens. Folded: no keys or values at all; W_k goes into the
queries, which are parameters, and W_v is applied to the weighted sums of the patches.

Both hold what their backward needs of the latest tile. Letters: H heads of width d, T tokens, b images of N patches.
"""

from __future__ import annotations

import torch

from .._check import at_least_float32
from .linear import matmul


def folds(heads: int, tokens: int, depth: int, patches: int) -> bool:
    """Whether folding takes fewer operations per image (a multiply-add counts as one)."""
    width = heads * depth
    folded = tokens * (2 * patches * heads * width + width * width)
    projected = 2 * patches * width * width + 2 * tokens * patches * width
    return folded < projected


class Projected:
    """Keys and values of the patches."""

    def __init__(self, query: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor) -> None:
        self.query = query
        """`[H,T,d]`, scaled."""
        self.weights = wk, wv

    def values_per_image(self, patches: int) -> int:
        """Numbers that an image of a tile needs."""
        heads, tokens, depth = self.query.shape
        return 2 * patches * heads * depth + 2 * heads * tokens * (patches + 1) + 2 * heads * tokens * depth

    def scores(self, tile: torch.Tensor) -> torch.Tensor:
        """tile `[b,N,D]` -> `[H,T,b,N]`: one product per head, as the queries are the same for every image."""
        heads, tokens, depth = self.query.shape
        rows = tile.flatten(0, 1)
        self.key, self.value = (matmul(rows, w.t()).view(-1, heads, depth).transpose(0, 1) for w in self.weights)
        return torch.bmm(self.query, self.key.transpose(1, 2)).view(heads, tokens, *tile.shape[:2])

    def mix(self, tile: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """attention `[H,b,T,N]` -> sums of the values `[H,b,T,d]`."""
        return attention @ self.value.unflatten(1, tile.shape[:2])

    def start_backward(self, wk: bool, wv: bool) -> None:
        """Before the first tile; which weights want a gradient."""
        self.wanted = wk, wv
        self.sums = [torch.zeros_like(w, dtype=at_least_float32(w.dtype)) for w in self.weights]

    def mix_backward(self, tile: torch.Tensor, attention: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the sums `[H,b,T,d]` -> of the attention `[H,b,T,N]`."""
        self.by_value = (attention.transpose(2, 3) @ grad).permute(1, 2, 0, 3).flatten(2)
        return grad @ self.value.unflatten(1, tile.shape[:2]).transpose(2, 3)

    def scores_backward(self, tile: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the scores `[H,T,b,N]` -> of the scaled queries `[H,T,d]`."""
        grad = grad.flatten(2)
        by_key = torch.bmm(grad.transpose(1, 2), self.query).transpose(0, 1).flatten(1)
        self.by_projected = by_key, self.by_value.flatten(0, 1)
        for total, rows, wanted in zip(self.sums, self.by_projected, self.wanted, strict=True):
            if wanted:
                total += matmul(rows.t(), tile.flatten(0, 1))
        return torch.bmm(grad, self.key)

    def by_patches(self) -> torch.Tensor:
        """Of the latest tile, `[b,N,D]`."""
        by_key, by_value = (matmul(rows, w) for rows, w in zip(self.by_projected, self.weights, strict=True))
        return by_key.add_(by_value).view_as(self.by_value)

    def weight_gradients(self) -> list[torch.Tensor]:
        """Of wk and wv, from the patches of all tiles."""
        return self.sums


class Folded:
    """Queries that have been through W_k, and weighted sums of the patches themselves."""

    def __init__(self, query: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor) -> None:
        heads, _, depth = query.shape
        self.query = query
        """`[H,T,d]`, scaled."""
        self.wk, self.wv = (w.unflatten(0, (heads, depth)) for w in (wk, wv))  # [H,d,D]
        self.folded = torch.bmm(query, self.wk)  # [H,T,D]

    def values_per_image(self, patches: int) -> int:
        """Numbers that an image of a tile needs."""
        heads, tokens, width = self.folded.shape
        return 2 * heads * tokens * (patches + 1) + 2 * heads * tokens * width

    def scores(self, tile: torch.Tensor) -> torch.Tensor:
        """tile `[b,N,D]` -> `[H,T,b,N]`."""
        heads, tokens, width = self.folded.shape
        scores = matmul(self.folded.view(heads * tokens, width), tile.flatten(0, 1).t())
        return scores.view(heads, tokens, *tile.shape[:2])

    def mix(self, tile: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """attention `[H,b,T,N]` -> sums of the values `[H,b,T,d]`."""
        heads, images, tokens, _ = attention.shape
        sums = torch.bmm(_beside(attention), tile)
        self.sums = sums.view(images, heads, tokens, -1).transpose(0, 1).flatten(1, 2)  # [H,b*T,D]
        return torch.bmm(self.sums, self.wv.transpose(1, 2)).unflatten(1, (images, tokens))

    def start_backward(self, wk: bool, wv: bool) -> None:
        """Before the first tile; which weights want a gradient."""
        sums = at_least_float32(self.folded.dtype)
        self.wanted = wv
        self.by_folded = torch.zeros_like(self.folded, dtype=sums)
        self.by_wv = torch.zeros_like(self.wv, dtype=sums)

    def mix_backward(self, tile: torch.Tensor, attention: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the sums `[H,b,T,d]` -> of the attention `[H,b,T,N]`."""
        heads, images, tokens, _ = grad.shape
        rows = grad.flatten(1, 2)
        if self.wanted:
            self.mix(tile, attention)
            self.by_wv += torch.bmm(rows.transpose(1, 2), self.sums)
        self.attention = _beside(attention)
        self.by_sums = torch.bmm(rows, self.wv).view(heads, images, tokens, -1).transpose(0, 1).flatten(1, 2)
        by_attention = torch.bmm(self.by_sums, tile.transpose(1, 2))  # [b,H*T,N]
        return by_attention.view(images, heads, tokens, -1).transpose(0, 1)

    def scores_backward(self, tile: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the scores `[H,T,b,N]` -> of the scaled queries `[H,T,d]`."""
        self.grad = grad.flatten(0, 1).flatten(1)  # [H*T,b*N]
        by_folded = matmul(self.grad, tile.flatten(0, 1)).view_as(self.folded)
        self.by_folded += by_folded
        return torch.bmm(by_folded, self.wk.transpose(1, 2))

    def by_patches(self) -> torch.Tensor:
        """Of the latest tile, `[b,N,D]`."""
        images, length = self.attention.shape[0], self.attention.shape[2]
        through_scores = matmul(self.grad.t(), self.folded.flatten(0, 1)).view(images, length, -1)
        return torch.baddbmm(through_scores, self.attention.transpose(1, 2), self.by_sums)

    def weight_gradients(self) -> list[torch.Tensor]:
        """Of wk and wv, from the patches of all tiles."""
        by_wk = torch.bmm(self.query.to(self.by_folded.dtype).transpose(1, 2), self.by_folded)
        return [by_wk.flatten(0, 1), self.by_wv.flatten(0, 1)]


def _beside(attention: torch.Tensor) -> torch.Tensor:
    """`[H,b,T,N]` -> `[b,H*T,N]`: all heads and tokens of an image side by side."""
    return attention.transpose(0, 1).flatten(1, 2)
