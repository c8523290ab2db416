"""expert_attention: one program per tile of images and group of heads; experts are looped over inside.

Tokens, queries, keys, values, probabilities and the gated sum stay on chip, so the K outputs are never written where
gates are given. Few images make few programs: the experts are then split over several of them, whose partial sums
(far fewer than K) are added in order afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .. import gates as gating
from . import tuning
from .attention_tile import attend, embed, project
from .launch import ceil_div, dot_precision, launch, near, power_of_two
from .matmul import too_many


@triton.jit
def _any_gate(gates, batch, stride_gb, stride_gh, IMAGES: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr):
    """Whether any image of the tile uses the expert in one of the program's heads."""
    local = tl.arange(0, BLOCK_I)
    image = tl.program_id(0).to(tl.int64) * IMAGES + local
    inside = (local < IMAGES) & (image < batch)
    used = tl.zeros((BLOCK_I,), tl.int32)
    for i in tl.static_range(GROUP):
        gate = tl.load(gates + image * stride_gb + i * stride_gh, mask=inside, other=0)
        used |= (gate != 0).to(tl.int32)
    return tl.max(used, 0) > 0


@triton.jit
def _forward(
    patches,
    w_embed,
    b_embed,
    w_qkv,
    b_qkv,
    gates,
    out,
    batch,
    experts,
    experts_each,
    pixels,
    stride_xb,
    stride_xn,
    stride_xp,
    stride_gb,
    stride_gk,
    stride_gh,
    negative_slope,
    scale,
    SW_K: tl.constexpr,
    SW_P: tl.constexpr,
    SW_Q: tl.constexpr,
    SB_K: tl.constexpr,
    SB_Q: tl.constexpr,
    SV_K: tl.constexpr,
    SV_Q: tl.constexpr,
    SV_S: tl.constexpr,
    SV_H: tl.constexpr,
    SV_D: tl.constexpr,
    SC_K: tl.constexpr,
    SC_S: tl.constexpr,
    SC_H: tl.constexpr,
    SC_D: tl.constexpr,
    GATED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    IMAGES: tl.constexpr,
    BLOCK_I: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    Q0: tl.constexpr,
    Q1: tl.constexpr,
    Q2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [splits, batch, length, HEADS, DEPTH]; without gates one expert per split."""
    row = tl.arange(0, ROWS)
    local = row // TOKENS  # rows that are left over make an image of their own
    image = tl.program_id(0).to(tl.int64) * IMAGES + local
    token = row % TOKENS
    inside = (image < batch) & (local < IMAGES)
    rows = patches + image * stride_xb + token.to(tl.int64) * stride_xn
    first_head = tl.program_id(1) * GROUP
    first = tl.program_id(2) * experts_each
    dtype = w_qkv.dtype.element_ty

    sums = (tl.zeros((ROWS, BLOCK_D), tl.float32),)
    for _ in tl.static_range(GROUP - 1):
        sums = sums + (tl.zeros((ROWS, BLOCK_D), tl.float32),)

    # hoisting the weights' offsets out of the loop would cost more registers than there are
    for k in tl.range(first, tl.minimum(first + experts_each, experts), disable_licm=True):
        expert = tl.zeros((), tl.int64) + k
        # without gates too, a branch: it keeps the compiler from mixing one head's loads into another's registers
        used = batch > 0
        if GATED:
            used = _any_gate(
                gates + expert * stride_gk + first_head * stride_gh, batch, stride_gb, stride_gh, IMAGES, BLOCK_I, GROUP
            )
        if used:
            w, b = w_embed + expert * SW_K, b_embed + expert * SB_K
            t0, t1, t2 = embed(
                rows,
                inside,
                w,
                b,
                pixels,
                stride_xp,
                negative_slope,
                SW_P,
                SW_Q,
                SB_Q,
                WIDTH,
                Q0,
                Q1,
                Q2,
                BLOCK_P,
                PRECISION,
            )
            t0, t1, t2 = t0.to(dtype), t1.to(dtype), t2.to(dtype)
            # a loop that stays one: unrolled, GROUP times as much code takes longer to compile and more registers
            for i in tl.range(0, GROUP, num_stages=1, disable_licm=True):
                h = first_head + i
                w = w_qkv + expert * SV_K + h * SV_H
                b = b_qkv + expert * SC_K + h * SC_H
                query = project(t0, t1, t2, w, b, SV_Q, SV_D, SC_D, WIDTH, DEPTH, Q0, Q1, Q2, BLOCK_D, PRECISION)
                w += SV_S
                b += SC_S
                key = project(t0, t1, t2, w, b, SV_Q, SV_D, SC_D, WIDTH, DEPTH, Q0, Q1, Q2, BLOCK_D, PRECISION)
                w += SV_S
                b += SC_S
                scores = tl.dot(query.to(dtype), tl.trans(key.to(dtype)), input_precision=PRECISION) * scale
                weights = attend(scores, local).to(dtype)
                value = project(t0, t1, t2, w, b, SV_Q, SV_D, SC_D, WIDTH, DEPTH, Q0, Q1, Q2, BLOCK_D, PRECISION)
                head = tl.dot(weights, value.to(dtype), input_precision=PRECISION)
                if GATED:
                    where = gates + image * stride_gb + expert * stride_gk + h * stride_gh
                    gate = tl.load(where, mask=inside, other=0).to(tl.float32)[:, None]
                    head = tl.where(gate != 0, gate * head, 0)
                updated = ()
                for j in tl.static_range(GROUP):
                    updated = updated + (tl.where(i == j, sums[j] + head, sums[j]),)
                sums = updated

    columns = tl.arange(0, BLOCK_D)
    out += ((tl.program_id(2).to(tl.int64) * batch + image) * TOKENS + token)[:, None] * (HEADS * DEPTH)
    for i in tl.static_range(GROUP):
        h = first_head + i
        tl.store(
            out + h * DEPTH + columns[None, :],
            sums[i].to(out.dtype.element_ty),
            mask=inside[:, None] & (columns < DEPTH)[None, :],
        )


MOST_TOKENS, MOST_WIDTH, MOST_DEPTH = 64, 256, 128
ROWS = 32  # of a tile
SPLIT_BELOW = 128  # programs; with fewer, the experts are split


@dataclass(frozen=True)
class Tile:
    """How a call is cut. Q0, Q1, Q2: pieces of the embedding width; GROUP: heads of one program."""

    GROUP: int
    ROWS: int
    IMAGES: int
    BLOCK_I: int
    TOKENS: int
    BLOCK_P: int
    Q0: int
    Q1: int
    Q2: int
    BLOCK_D: int
    threads: int


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    backward = op.endswith("_backward")
    patches, w_qkv = args[backward:][:4:3]
    batch, length, pixels = patches.shape
    _, width, _, heads, depth = w_qkv.shape
    for name, size, most in (("N", length, MOST_TOKENS), ("Q", width, MOST_WIDTH), ("d", depth, MOST_DEPTH)):
        if size > most:
            return f"takes at most {name} = {most}, got {size}"
    return too_many(batch * length, max(pixels, width, 3 * heads * depth), "a layer") if backward else None


def tile_for(patches: torch.Tensor, w_qkv: torch.Tensor) -> Tile:
    """The default configuration."""
    _, length, pixels = patches.shape
    _, width, _, heads, depth = w_qkv.shape
    wide = patches.dtype == torch.float32  # its numbers, cut in two for the matrix units, fill twice the registers
    rows = power_of_two(length, ROWS // 2 if wide else ROWS)
    return Tile(
        GROUP=1 if wide else max(n for n in (1, 2, 3) if heads % n == 0),
        ROWS=rows,
        IMAGES=rows // length,
        BLOCK_I=power_of_two(rows // length),
        TOKENS=length,
        BLOCK_P=min(32, power_of_two(pixels, 16)),
        **dict(zip(("Q0", "Q1", "Q2"), pieces(width), strict=True)),
        BLOCK_D=power_of_two(depth, 16),
        threads=256,
    )


def tiles_for(patches: torch.Tensor, w_qkv: torch.Tensor) -> list[Tile]:
    """The default configuration and the others that tuning tries."""
    default = tile_for(patches, w_qkv)
    length, rows = patches.shape[1], default.ROWS // 2
    found = [default, replace(default, threads=default.threads // 2), replace(default, GROUP=1)]
    if rows >= max(16, length):
        images = rows // length
        found.append(replace(default, ROWS=rows, IMAGES=images, BLOCK_I=power_of_two(images)))
    return list(dict.fromkeys(found))


def pieces(width: int) -> tuple[int, int, int]:
    """Up to three falling powers of two, each at least 16, that hold `width` columns with the least padding."""
    left, found = ceil_div(width, 16) * 16, []
    for _ in range(2):
        found.append(1 << (left.bit_length() - 1) if left else 0)
        left -= found[-1]
    found.append(power_of_two(left) if left else 0)
    return tuple(found) if found[1] != found[2] or not found[2] else (found[0], 2 * found[1], 0)


def useful_share(patches: torch.Tensor, w_qkv: torch.Tensor) -> float:
    """Arithmetic that equations 2 and 3 need over what the tiles compute, padding and scores across images included."""
    _, length, pixels = patches.shape
    _, width, _, heads, depth = w_qkv.shape
    tile = tile_for(patches, w_qkv)
    useful = length * (pixels * width + heads * depth * (3 * width + 2 * length))
    padded = tile.Q0 + tile.Q1 + tile.Q2
    embedding = ceil_div(pixels, tile.BLOCK_P) * tile.BLOCK_P * padded * (heads // tile.GROUP)
    computed = tile.ROWS * (embedding + heads * tile.BLOCK_D * (3 * padded + 2 * tile.ROWS))
    return useful * tile.IMAGES / computed


def expert_attention(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> torch.Tensor:
    """See levit_kernels.expert_attention."""
    w_embed, b_embed, w_qkv, b_qkv = (near(x) for x in (w_embed, b_embed, w_qkv, b_qkv))
    args = (patches, w_embed, b_embed, w_qkv, b_qkv, gates, negative_slope)
    bucket = (patches.dtype, tuning.bucket_of(len(patches)), tuning.bucket_of(len(w_qkv)), gates is None)
    bucket += (*patches.shape[1:], *w_qkv.shape[1:])
    tile = tuning.choose(
        "expert_attention", bucket, tiles_for(patches, w_qkv), lambda tile: _run(tile, *args), patches.device
    )
    return _run(tile, *args)


def _run(
    tile: Tile,
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> torch.Tensor:
    batch, length, pixels = patches.shape
    experts, width, _, heads, depth = w_qkv.shape
    tiles = ceil_div(batch, tile.IMAGES)
    if gates is None:
        splits, per_image, gate_strides = experts, None, (0, 0, 0)
        dtype = patches.dtype
    else:
        splits = min(experts, ceil_div(SPLIT_BELOW, tiles * (heads // tile.GROUP)))
        per_image = gating.expand(gates)
        gate_strides = gating.broadcast_strides(per_image)
        dtype = torch.promote_types(patches.dtype, gates.dtype)
    each = ceil_div(experts, splits)
    splits = ceil_div(experts, each)
    partial = dtype if gates is None or splits == 1 else torch.float32
    out = patches.new_empty(splits, batch, length, heads * depth, dtype=partial)
    launch(
        _forward,
        (tiles, heads // tile.GROUP, splits),
        *(patches, w_embed, b_embed, w_qkv, b_qkv, per_image, out, batch, experts, each, pixels),
        *patches.stride(),
        *gate_strides,
        *(negative_slope, 1 / math.sqrt(depth)),
        **strides_of(w_embed, b_embed, w_qkv, b_qkv),
        GATED=gates is not None,
        HEADS=heads,
        WIDTH=width,
        DEPTH=depth,
        PRECISION=dot_precision(patches.dtype),
        **vars(tile),
    )
    if gates is None:
        return out
    return out[0] if splits == 1 else out.sum(0).to(dtype)


def strides_of(
    w_embed: torch.Tensor, b_embed: torch.Tensor, w_qkv: torch.Tensor, b_qkv: torch.Tensor
) -> dict[str, int]:
    """Of the weights, under the names that the kernels give them."""
    names = (
        "SW_K",
        "SW_P",
        "SW_Q",
        "SB_K",
        "SB_Q",
        "SV_K",
        "SV_Q",
        "SV_S",
        "SV_H",
        "SV_D",
        "SC_K",
        "SC_S",
        "SC_H",
        "SC_D",
    )
    strides = (*w_embed.stride(), *b_embed.stride(), *w_qkv.stride(), *b_qkv.stride())
    return dict(zip(names, strides, strict=True))
