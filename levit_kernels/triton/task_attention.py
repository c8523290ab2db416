"""task_attention: one program per image, group of heads and block of queries; scores never leave the chip.

Torch computes what is one large matrix product, a kernel all that lies between. It serves both forms that `folds`
chooses from by counting operations: products are what either form costs here too, and few tokens fold on every device
(one token of the CIFAR preset: a 25th of the operations, a tenth of the numbers to write).

- Projected: H groups of T queries each, against keys and values of d columns that a product made of the patches.
- Folded: one group of H*T queries that went through W_k, against the patches themselves; W_v follows.

In both a token is one more key and value for its own queries, so the kernel need not know which form it computes.
A block of scores [ROWS, BLOCK_N] covers all patches of an image: that spares the rescaling of an online softmax, and
columns of keys and values may be any number, as they come BLOCK_C at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..composed.linear import matmul
from ..composed.task_attention import tiles
from ..composed.task_forms import folds
from .launch import ceil_div, dot_precision, launch, power_of_two

MOST_PATCHES = 256
SCRATCH_BYTES = 256 << 20  # of keys, values and weighted sums at a time


@triton.jit
def load_tile(x, rows, inside, columns, most_columns, stride_row, stride_column):
    """The tile [rows, columns], zero outside of it."""
    where = x + (rows * stride_row)[:, None] + (columns.to(tl.int64) * stride_column)[None, :]
    return tl.load(where, mask=inside[:, None] & (columns < most_columns)[None, :], other=0)


@triton.jit
def locate(rows, tokens, stride_kb, stride_kg, stride_oh, stride_ot, ROWS: tl.constexpr):
    """A program's image, its rows of all H*T, their heads and tokens, which of them exist; where keys and values of
    the image, and a row's own ones, begin.
    """
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(2).to(tl.int64)
    local = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = group * rows + local
    head, token = row // tokens, row % tokens
    offset = image * stride_kb + group * stride_kg
    return image, row, head, token, local < rows, offset, head * stride_oh + token * stride_ot


@triton.jit
def attend(
    query,
    own_key,
    keys,
    row,
    inside,
    patch,
    patches,
    depth,
    scale,
    stride_kn,
    stride_kc,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """softmax over the key that is a query's own and the keys of the image -> [ROWS] and [ROWS, BLOCK_N] in float32."""
    own = tl.zeros((row.shape[0],), tl.float32)
    scores = tl.zeros((row.shape[0], patch.shape[0]), tl.float32)
    for first in range(0, depth, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        q = load_tile(query, row, inside, c, depth, depth, 1)
        key = load_tile(keys, patch, patch < patches, c, depth, stride_kn, stride_kc)
        scores = tl.dot(q, tl.trans(key), scores, input_precision=PRECISION)
        mine = tl.load(own_key[:, None] + c[None, :], mask=inside[:, None] & (c < depth)[None, :], other=0)
        own += tl.sum(q.to(tl.float32) * mine.to(tl.float32), 1)
    own *= scale
    scores = tl.where((patch < patches)[None, :], scores * scale, float("-inf"))
    most = tl.maximum(tl.max(scores, 1), own)
    own = tl.exp(own - most)
    scores = tl.exp(scores - most[:, None])
    total = own + tl.sum(scores, 1)
    return own / total, scores / total[:, None]


@triton.jit
def _forward(
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
    out,
    stride_mh,
    stride_mb,
    stride_mt,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [H,B,T,C] of query [H,T,C], own_key and own_value [H,T,C], keys and values [B,N,G,C]: rows = H*T/G."""
    image, row, head, token, inside, offset, mine = locate(
        rows, tokens, stride_kb, stride_kg, stride_oh, stride_ot, ROWS
    )
    patch = tl.arange(0, BLOCK_N).to(tl.int64)
    own, attention = attend(
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
    attention = attention.to(query.dtype.element_ty)
    out += head * stride_mh + image * stride_mb + token * stride_mt
    for first in range(0, depth, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        stored = inside[:, None] & (c < depth)[None, :]
        value = load_tile(values + offset, patch, patch < patches, c, depth, stride_kn, stride_kc)
        mixed = tl.dot(attention, value, input_precision=PRECISION)
        mixed += own[:, None] * tl.load((own_value + mine)[:, None] + c[None, :], mask=stored, other=0).to(tl.float32)
        tl.store(out[:, None] + c[None, :], mixed.to(out.dtype.element_ty), mask=stored)


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    length = args[1 + op.endswith("_backward")].shape[1]
    return f"takes at most N = {MOST_PATCHES}, got {length}" if length > MOST_PATCHES else None


def tile_for(rows: int, patches: int, depth: int, dtype: torch.dtype) -> dict[str, int]:
    """The default configuration; float32 numbers, cut in two for the matrix units, take twice the registers."""
    wide, block_n = dtype == torch.float32, power_of_two(patches, 16)
    most_scores = 2048 if wide else 4096  # of a program; in a backward pass it holds as many gradients
    return {
        "ROWS": min(power_of_two(rows, 16), max(16, most_scores // block_n)),
        "BLOCK_N": block_n,
        "BLOCK_C": 16 if wide and block_n <= 128 else min(32, power_of_two(depth, 16)),
        "threads": 256 if wide else 128,
        "num_stages": 2 if not wide else 3 if block_n <= 128 else 1,  # those with which no target spills
    }


@dataclass(frozen=True)
class Tokens:
    """What tokens bring to every image, and what images must bring to them. C is d or, folded, D."""

    folded: bool
    plain_query: torch.Tensor
    """`[H,T,d]`"""
    query: torch.Tensor
    """`[H,T,C]`"""
    own_key: torch.Tensor
    """`[H,T,C]`; where folded the tokens themselves, for every head the same."""
    own_value: torch.Tensor
    """`[H,T,C]`"""
    wk: torch.Tensor
    wv: torch.Tensor
    """Of the heads, `[H,d,D]`, as wk."""
    scale: float

    def tiles(self, patches: torch.Tensor) -> Iterator[slice]:
        """Parts of the batch that need no more than SCRATCH_BYTES."""
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

    def start(self, kernel: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any) -> None:
        """Launches a kernel over keys and values; `args` follow those that all have."""
        heads, tokens, depth = self.query.shape
        images, length, groups = keys.shape[:3]
        tile = tile_for(heads * tokens // groups, length, depth, keys.dtype)
        launch(
            kernel,
            (images, ceil_div(heads * tokens // groups, tile["ROWS"]), groups),
            *(self.query, self.own_key, self.own_value, keys, values),
            *(tokens, heads * tokens // groups, length, depth, self.scale),
            *self.own_key.stride()[:2],
            *keys.stride(),
            *args,
            PRECISION=dot_precision(keys.dtype),
            **tile,
        )

    def mix(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The sums of values and the own ones by attention, `[H,b,T,C]`."""
        (heads, tokens, depth), images = self.query.shape, len(keys)
        if self.folded:
            out = keys.new_empty(heads, images, tokens, depth)
        else:
            out = keys.new_empty(images, tokens, heads, depth).permute(2, 0, 1, 3)
        self.start(_forward, keys, values, out, *out.stride()[:3])
        return out

    def join(self, mixed: torch.Tensor) -> torch.Tensor:
        """What `mix` returned -> the heads' outputs side by side, `[b*T,D]`."""
        heads, images, tokens, _ = mixed.shape
        if not self.folded:
            return mixed.permute(1, 2, 0, 3).view(images * tokens, -1)
        out = mixed.new_empty(images * tokens, heads, self.wv.shape[1])
        torch.bmm(mixed.flatten(1, 2), self.wv.transpose(1, 2), out=out.transpose(0, 1))
        return out.view(images * tokens, -1)


def tokens_for(
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
    folded = folds(num_heads, len(tokens), depth, patches.shape[1])
    query = _by_head(matmul(tokens, wq.t()), num_heads)
    heads_of = (w.unflatten(0, (num_heads, depth)) for w in (wk, wv))
    if not folded:
        key, value = (_by_head(matmul(tokens, w.t()), num_heads) for w in (wk, wv))
        return Tokens(False, query, query, key, value, *heads_of, scale)
    by_key, by_value = heads_of
    own = tokens.contiguous().expand(num_heads, -1, -1)
    return Tokens(True, query, torch.bmm(query, by_key), own, own, by_key, by_value, scale)


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[T,D]` -> `[H,T,d]`, dense."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1).contiguous()


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
    asking = tokens_for(patches, tokens, wq, wk, wv, num_heads, scale)
    heads = [asking.join(asking.mix(*asking.keys_and_values(patches[part]))) for part in asking.tiles(patches)]
    rows = heads[0] if len(heads) == 1 else torch.cat(heads)
    return matmul(rows, wo.t(), bo).view(len(patches), *tokens.shape)
