"""task_attention from torch calls: one pass over the patches for all tokens, in tiles of images.

The tokens' own queries, keys and values do not depend on the image and are computed once. A tile's scores
`[H,b,T,1+N]` hold each token's own score in column 0, so that one softmax covers both. What happens to the patches is
one of the two forms of task_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .._check import at_least_float32
from .linear import matmul
from .task_forms import Folded, Projected, folds

TILE_BYTES = {"cpu": 3 << 20, "cuda": 256 << 20}


def task_attention(
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None,
) -> torch.Tensor:
    """See levit_kernels.task_attention."""
    own = own_part(tokens, wq, wk, wv, num_heads, scale)
    form = _form(own.query, patches, wk, wv)
    heads = patches.new_empty(len(patches), *tokens.shape)
    for images in _cached(patches, form):
        _mix(form, own, patches[images], _attend(form, own, patches[images]), out=heads[images])
    return matmul(heads.flatten(0, 1), wo.t(), bo).view_as(heads)


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
    """Gradients of the tensor arguments that `needs` names, in their order; every tile is computed anew."""
    own = own_part(tokens, wq, wk, wv, num_heads, scale)
    form = _form(own.query, patches, wk, wv)
    form.start_backward(needs[3], needs[4])
    sums = at_least_float32(patches.dtype)
    by_patches = torch.empty_like(patches, memory_format=torch.contiguous_format) if needs[1] else None
    by_query, by_key, by_value = (torch.zeros_like(own.query, dtype=sums) for _ in range(3))
    by_wo, by_bo = torch.zeros_like(wo, dtype=sums), torch.zeros_like(bo, dtype=sums)
    for images in _cached(patches, form):
        tile, rows = patches[images], grad[images].flatten(0, 1)
        attention = _attend(form, own, tile)
        if needs[6]:
            by_bo += rows.sum(0, dtype=sums)
        if needs[5]:
            heads = torch.empty_like(grad[images], memory_format=torch.contiguous_format)
            _mix(form, own, tile, attention, out=heads)
            by_wo += matmul(rows.t(), heads.flatten(0, 1))
        if not any(needs[:5]):
            continue
        # [H,b,T,d] of the heads' outputs, [H,b,T,1+N] of attention and scores
        upstream = matmul(rows, wo).view(len(tile), len(tokens), num_heads, -1).permute(2, 0, 1, 3)
        by_attention = torch.empty_like(attention)
        by_attention[..., 0] = (upstream * own.value[:, None]).sum(-1)
        by_attention[..., 1:] = form.mix_backward(tile, attention[..., 1:], upstream)
        by_value += (attention[..., :1] * upstream).sum(1, dtype=sums)
        by_scores = torch._softmax_backward_data(by_attention, attention, -1, attention.dtype)
        own_scores = by_scores[..., 0].sum(1, dtype=sums)[..., None]
        by_query += own_scores * own.key
        by_key += own_scores * own.query
        by_query += form.scores_backward(tile, by_scores[..., 1:].transpose(1, 2))
        if by_patches is not None:
            by_patches[images] = form.by_patches()
    by_query, by_key, by_value = (x.transpose(0, 1).flatten(1) for x in (by_query * own.scale, by_key, by_value))
    folded_key, folded_value = form.weight_gradients()
    exact = tokens.to(sums)
    grads = (
        by_query @ wq.to(sums) + by_key @ wk.to(sums) + by_value @ wv.to(sums),
        by_patches,
        by_query.t() @ exact,
        by_key.t() @ exact + folded_key,
        by_value.t() @ exact + folded_value,
        by_wo,
        by_bo,
    )
    return [x.to(patches.dtype) for x, need in zip(grads, needs, strict=True) if need]


class Own(NamedTuple):
    """What the tokens say of themselves, `[H,T,d]`; the query is scaled."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: torch.Tensor
    """`[H,T]`: of each token's query with its own key."""
    scale: float


def own_part(
    tokens: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    num_heads: int,
    scale: float | None,
) -> Own:
    scale = (tokens.shape[1] // num_heads) ** -0.5 if scale is None else scale
    query, key, value = (
        matmul(tokens, w.t()).unflatten(1, (num_heads, -1)).transpose(0, 1).contiguous() for w in (wq, wk, wv)
    )
    query = query * scale
    return Own(query, key, value, (query[..., None, :] @ key[..., None])[..., 0, 0], scale)


def _form(query: torch.Tensor, patches: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor) -> Folded | Projected:
    return (Folded if folds(*query.shape, patches.shape[1]) else Projected)(query, wk, wv)


def _attend(form: Folded | Projected, own: Own, tile: torch.Tensor) -> torch.Tensor:
    """softmax over the token itself and the tile's patches: `[b,N,D]` -> `[H,b,T,1+N]`."""
    heads, tokens = own.scores.shape
    scores = tile.new_empty(heads, len(tile), tokens, 1 + tile.shape[1])
    scores[..., 0] = own.scores[:, None]
    scores[..., 1:] = form.scores(tile).transpose(1, 2)
    return torch.softmax(scores, -1)


def _mix(form: Folded | Projected, own: Own, tile: torch.Tensor, attention: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the heads' outputs side by side, `[b,T,D]`."""
    mixed = form.mix(tile, attention[..., 1:]).permute(1, 2, 0, 3)
    share = attention[..., 0].permute(1, 2, 0)[..., None]
    torch.addcmul(mixed, share, own.value.transpose(0, 1), out=out.view(mixed.shape))


def _cached(patches: torch.Tensor, form: Folded | Projected) -> Iterator[slice]:
    """Tiles whose keys, values, scores and sums stay in a core's cache."""
    return tiles(patches, form.values_per_image(patches.shape[1]), TILE_BYTES[patches.device.type])


def tiles(patches: torch.Tensor, values_per_image: int, most_bytes: int) -> Iterator[slice]:
    """Equal parts of the batch, in each of which that many numbers per image take no more than `most_bytes`."""
    most = max(1, most_bytes // (values_per_image * patches.element_size()))
    step = -(-len(patches) // -(-len(patches) // most))
    for start in range(0, len(patches), step):
        yield slice(start, min(start + step, len(patches)))
