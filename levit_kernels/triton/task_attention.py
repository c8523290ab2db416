"""task_attention: one program per image, group of heads and block of queries; scores never leave the chip.

What torch computes around the kernel, and the two forms that the kernel serves: composed/task_tokens.py. Products are
what either form costs here too, and few tokens fold on every device (one token of the CIFAR preset: a 25th of the
operations, a tenth of the numbers to write).

A block of scores [ROWS, BLOCK_N] covers all patches of an image: that spares the rescaling of an online softmax, and
columns of keys and values may be any number, as they come BLOCK_C at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..composed import task_tokens
from .launch import ceil_div, dot_precision, launch, power_of_two

MOST_PATCHES = 256


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


class Tokens(task_tokens.Tokens):
    """With the Triton kernel of the forward pass."""

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

    def attend(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        self.start(_forward, keys, values, out, *out.stride()[:3])


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
    return task_tokens.forward(Tokens.of(patches, tokens, wq, wk, wv, num_heads, scale), patches, wo, bo)
