"""Equations 2-3 for a tile of images and one expert, on chip: what forward and backward of expert_attention share.

A tile's rows are the tokens of as many images as it holds, one after another; a mask keeps the images apart. (Batched
products would compute no scores across images, but every warp then computes whole images, which takes more registers
than there are.) The embedding width WIDTH is cut into up to three powers of two (100 -> 64 + 32 + 16), because products
over it are deep and padding there costs most; a head's columns are padded to one power of two, BLOCK_D. Strides of the
weights are compile-time constants: only then does the compiler know that rows of 100 numbers may be read 16 bytes at a
time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight(
    w,
    rows,
    most_rows,
    first,
    most_columns,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    FULL: tl.constexpr,
):
    """The tile [rows, first : first + SIZE] of a matrix, zero outside of it; FULL: no row is outside."""
    columns = first + tl.arange(0, SIZE)
    inside = (columns < most_columns)[None, :]
    if not FULL:
        inside = inside & (rows < most_rows)[:, None]
    return tl.load(w + rows[:, None] * ROW + columns[None, :] * COLUMN, mask=inside, other=0)


@triton.jit
def _activate(embedded, b, first, negative_slope, WIDTH: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    columns = first + tl.arange(0, SIZE)
    embedded += tl.load(b + columns * STRIDE, mask=columns < WIDTH, other=0).to(tl.float32)[None, :]
    tokens = tl.where(embedded > 0, embedded, negative_slope * embedded)
    # the padding stays zero even where an infinite patch has made NaN of it
    return tl.where((columns < WIDTH)[None, :], tokens, 0)


@triton.jit
def embed(
    rows,
    inside,
    w,
    b,
    pixels,
    stride_xp,
    negative_slope,
    SW_P: tl.constexpr,
    SW_Q: tl.constexpr,
    SB_Q: tl.constexpr,
    WIDTH: tl.constexpr,
    Q0: tl.constexpr,
    Q1: tl.constexpr,
    Q2: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Equation 2: tokens of the rows (pointers to patches) in three pieces of Q0, Q1, Q2 columns; 0: no such piece."""
    ROWS: tl.constexpr = rows.shape[0]
    SIZE1: tl.constexpr = Q1 if Q1 > 0 else 16
    SIZE2: tl.constexpr = Q2 if Q2 > 0 else 16
    t0 = tl.zeros((ROWS, Q0), tl.float32)
    t1 = tl.zeros((ROWS, SIZE1), tl.float32)
    t2 = tl.zeros((ROWS, SIZE2), tl.float32)
    for first in range(0, pixels, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        x = rows[:, None] + p.to(tl.int64)[None, :] * stride_xp
        x = tl.load(x, mask=inside[:, None] & (p < pixels)[None, :], other=0)
        t0 = tl.dot(x, _weight(w, p, pixels, 0, WIDTH, SW_P, SW_Q, Q0, False), t0, input_precision=PRECISION)
        if Q1 > 0:
            t1 = tl.dot(x, _weight(w, p, pixels, Q0, WIDTH, SW_P, SW_Q, SIZE1, False), t1, input_precision=PRECISION)
        if Q2 > 0:
            t2 = tl.dot(
                x, _weight(w, p, pixels, Q0 + Q1, WIDTH, SW_P, SW_Q, SIZE2, False), t2, input_precision=PRECISION
            )
    t0 = _activate(t0, b, 0, negative_slope, WIDTH, SB_Q, Q0)
    t1 = _activate(t1, b, Q0, negative_slope, WIDTH, SB_Q, SIZE1)
    t2 = _activate(t2, b, Q0 + Q1, negative_slope, WIDTH, SB_Q, SIZE2)
    return t0, t1, t2


@triton.jit
def project(
    t0,
    t1,
    t2,
    w,
    b,
    SW_Q: tl.constexpr,
    SW_D: tl.constexpr,
    SB_D: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    Q0: tl.constexpr,
    Q1: tl.constexpr,
    Q2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries, keys or values of one head [rows, BLOCK_D] in float32, zero in the padding."""
    tile = _weight(w, tl.arange(0, Q0), WIDTH, 0, DEPTH, SW_Q, SW_D, BLOCK_D, Q0 <= WIDTH)
    out = tl.dot(t0, tile, input_precision=PRECISION)
    if Q1 > 0:
        tile = _weight(w, Q0 + tl.arange(0, Q1), WIDTH, 0, DEPTH, SW_Q, SW_D, BLOCK_D, Q0 + Q1 <= WIDTH)
        out = tl.dot(t1, tile, out, input_precision=PRECISION)
    if Q2 > 0:
        tile = _weight(w, Q0 + Q1 + tl.arange(0, Q2), WIDTH, 0, DEPTH, SW_Q, SW_D, BLOCK_D, Q0 + Q1 + Q2 <= WIDTH)
        out = tl.dot(t2, tile, out, input_precision=PRECISION)
    columns = tl.arange(0, BLOCK_D)
    out += tl.load(b + columns * SB_D, mask=columns < DEPTH, other=0).to(tl.float32)[None, :]
    return tl.where((columns < DEPTH)[None, :], out, 0)


@triton.jit
def attend(scores, image):
    """softmax of scaled scores [ROWS, ROWS] in float32; rows see those of their own image alone."""
    scores = tl.where(image[:, None] == image[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]
