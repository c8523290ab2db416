"""Gradients of expert_attention: one launch recomputes the tokens, one the attention, and writes what its inputs'
gradients are made of; the products that remain are those of a linear layer. Of gates alone nothing else is computed.

The tokens go through memory, unlike in the forward kernel: beside queries, keys and two square matrices there are no
registers for them (float32 spilled on sm_100), and so they are embedded once, not once per head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .. import gates as gating
from .attention_tile import attend
from .expert_attention import tile_for
from .launch import ceil_div, dot_precision, launch, near
from .layer_backward import layer_backward
from .matmul import LEAKY, LEAKY_BACKWARD, matmul, product

SCRATCH_BYTES = 256 << 20  # of tokens and of the gradients of queries, keys and values at a time


@triton.jit
def _project(
    tokens,
    row,
    most,
    w,
    b,
    SV_Q: tl.constexpr,
    SV_D: tl.constexpr,
    SC_D: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries, keys or values of one head [rows, BLOCK_D] in float32, zero in the padding."""
    columns = tl.arange(0, BLOCK_D)
    out = tl.zeros((row.shape[0], BLOCK_D), tl.float32)
    out = product(out, tokens, w, row, columns, most, DEPTH, WIDTH, WIDTH, 1, SV_Q, SV_D, BLOCK_Q, PRECISION)
    out += tl.load(b + columns * SC_D, mask=columns < DEPTH, other=0).to(tl.float32)[None, :]
    return tl.where((columns < DEPTH)[None, :], out, 0)


@triton.jit
def _backward(
    grad,
    tokens,
    w_qkv,
    b_qkv,
    gates,
    by_qkv,
    by_gates,
    batch,
    stride_dk,
    stride_db,
    stride_dn,
    stride_de,
    stride_gb,
    stride_gk,
    stride_gh,
    scale,
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
    BY_INPUTS: tl.constexpr,
    BY_GATES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    IMAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: a tile of images, one head, one expert.

    tokens [K,B*N,WIDTH], by_qkv [K,B*N,3,HEADS,DEPTH], by_gates [K,HEADS,B,N], the last still to be summed over tokens.
    """
    row = tl.arange(0, ROWS)
    local = row // TOKENS  # rows that are left over make an image of their own
    image = tl.program_id(0).to(tl.int64) * IMAGES + local
    token = row % TOKENS
    inside = (image < batch) & (local < IMAGES)
    h = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    dtype = w_qkv.dtype.element_ty
    here = (expert * batch + image) * TOKENS + token

    start = tl.program_id(0).to(tl.int64) * (IMAGES * TOKENS)
    most = tl.minimum(IMAGES * TOKENS, batch * TOKENS - start)
    own = tokens + (expert * batch * TOKENS + start) * WIDTH
    w = w_qkv + expert * SV_K + h * SV_H
    b = b_qkv + expert * SC_K + h * SC_H
    value = _project(
        own, row, most, w + 2 * SV_S, b + 2 * SC_S, SV_Q, SV_D, SC_D, WIDTH, DEPTH, BLOCK_Q, BLOCK_D, PRECISION
    ).to(dtype)
    columns = tl.arange(0, BLOCK_D)
    stored = inside[:, None] & (columns < DEPTH)[None, :]
    where = grad + expert * stride_dk + image * stride_db + token.to(tl.int64) * stride_dn
    where = where[:, None] + (h * DEPTH + columns).to(tl.int64)[None, :] * stride_de
    by_weights = tl.dot(tl.load(where, mask=stored, other=0).to(dtype), tl.trans(value), input_precision=PRECISION)
    query = _project(own, row, most, w, b, SV_Q, SV_D, SC_D, WIDTH, DEPTH, BLOCK_Q, BLOCK_D, PRECISION).to(dtype)
    key = _project(own, row, most, w + SV_S, b + SC_S, SV_Q, SV_D, SC_D, WIDTH, DEPTH, BLOCK_Q, BLOCK_D, PRECISION).to(
        dtype
    )
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    weights = attend(scores * scale, local)
    if BY_GATES:  # <output, upstream> of a row, the output being weights @ value
        sums = by_gates + ((expert * HEADS + h) * batch + image) * TOKENS + token
        tl.store(sums, tl.sum(weights * by_weights, 1), mask=inside)
    if BY_INPUTS:
        gated = weights
        if GATED:
            own_gate = gates + image * stride_gb + expert * stride_gk + h * stride_gh
            gate = tl.load(own_gate, mask=inside, other=0).to(tl.float32)[:, None]
            gated = weights * gate
            by_weights *= gate
        # weights are zero across images, and so is what follows
        by_scores = weights * (by_weights - tl.sum(weights * by_weights, 1)[:, None]) * scale
        by_scores = by_scores.to(dtype)
        gated = gated.to(dtype)
        out = by_qkv + (here * (3 * HEADS * DEPTH))[:, None] + h * DEPTH + columns[None, :]
        tl.store(out, tl.dot(by_scores, key, input_precision=PRECISION).to(dtype), mask=stored)
        by_key = tl.dot(tl.trans(by_scores), query, input_precision=PRECISION)
        tl.store(out + HEADS * DEPTH, by_key.to(dtype), mask=stored)
        upstream = tl.load(where, mask=stored, other=0).to(dtype)  # again: kept, it would fill registers
        by_value = tl.dot(tl.trans(gated), upstream, input_precision=PRECISION)
        tl.store(out + 2 * HEADS * DEPTH, by_value.to(dtype), mask=stored)


def expert_attention_backward(
    grad: torch.Tensor,
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
    saved: list[torch.Tensor],
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of the tensor arguments that `needs` names, in their order; nothing was saved, all is recomputed."""
    batch, length, _ = patches.shape
    experts, width, _, heads, depth = w_qkv.shape
    w_embed, b_embed, w_qkv, b_qkv = (near(x) for x in (w_embed, b_embed, w_qkv, b_qkv))
    numbers = batch * length * (width + 3 * heads * depth * any(needs[:5]))
    step = max(1, SCRATCH_BYTES // (numbers * patches.element_size()))
    per_image = None if gates is None else gating.expand(gates)
    rows = patches.reshape(1, batch * length, -1)
    by_patches, by_weights, by_gates = None, [], []
    for k in range(0, experts, step):
        weights = [x[k : k + step] for x in (w_embed, b_embed, w_qkv, b_qkv)]
        part = grad if gates is not None else grad[k : k + step]
        chunk_gates = None if gates is None else per_image[:, k : k + step]
        tokens = matmul(rows, weights[0], weights[1], LEAKY, negative_slope=negative_slope)
        by_qkv, by_gate = _attention(part, patches, tokens, *weights[2:], chunk_gates, needs)
        by_gates.append(by_gate)
        if any(needs[:5]):
            part, grads = _layers(patches, weights, tokens, by_qkv, negative_slope, needs)
            by_patches = part if by_patches is None else by_patches.add_(part)
            by_weights.append(grads)
    grads = [by_patches.to(patches.dtype)] if needs[0] else []
    grads += [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*by_weights, strict=True)]
    if needs[5]:
        every = torch.cat(by_gates) if len(by_gates) > 1 else by_gates[0]
        grads.append(gating.reduce_like(every.permute(2, 0, 1, 3), gates))
    return grads


def _attention(
    grad: torch.Tensor,
    patches: torch.Tensor,
    tokens: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    per_image: torch.Tensor | None,
    needs: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """-> gradients of q, k, v `[K,B*N,3*H*d]` and of the gates `[K,H,B,N]`, those asked for."""
    batch, length, _ = patches.shape
    experts, width, _, heads, depth = w_qkv.shape
    tile = tile_for(patches, w_qkv)
    by_qkv = by_gates = None
    if any(needs[:5]):
        by_qkv = tokens.new_empty(experts, batch * length, 3 * heads * depth)
    if needs[5]:
        by_gates = tokens.new_empty(experts, heads, batch, length, dtype=torch.float32)
    launch(
        _backward,
        (ceil_div(batch, tile.IMAGES), heads, experts),
        *(grad, tokens, w_qkv, b_qkv, per_image, by_qkv, by_gates, batch),
        *(grad.stride() if per_image is None else (0, *grad.stride())),
        *((0, 0, 0) if per_image is None else gating.broadcast_strides(per_image)),
        1 / math.sqrt(depth),
        **dict(zip(("SV_K", "SV_Q", "SV_S", "SV_H", "SV_D"), w_qkv.stride(), strict=True)),
        **dict(zip(("SC_K", "SC_S", "SC_H", "SC_D"), b_qkv.stride(), strict=True)),
        GATED=per_image is not None,
        BY_INPUTS=by_qkv is not None,
        BY_GATES=by_gates is not None,
        HEADS=heads,
        WIDTH=width,
        DEPTH=depth,
        ROWS=tile.ROWS,
        IMAGES=tile.IMAGES,
        TOKENS=length,
        BLOCK_Q=16,  # 100 columns are padded to 112, not 128
        BLOCK_D=tile.BLOCK_D,
        PRECISION=dot_precision(patches.dtype),
        threads=tile.threads,
    )
    return by_qkv, by_gates


def _layers(
    patches: torch.Tensor,
    weights: list[torch.Tensor],
    tokens: torch.Tensor,
    by_qkv: torch.Tensor,
    negative_slope: float,
    needs: list[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """-> gradients of the patches, in float32, and of the weights, those asked for."""
    if len(tokens) == 1 and all(needs[1:5]):
        return _one_expert(patches, weights, tokens[0], by_qkv[0], negative_slope, needs[0])
    w_embed, _, w_qkv, b_qkv = weights
    by_embedded = by_patches = None
    if any(needs[:3]):
        flat = w_qkv.flatten(2).transpose(1, 2)
        by_embedded = matmul(by_qkv, flat, None, LEAKY_BACKWARD, tokens, negative_slope=negative_slope)
    if needs[0]:
        by_patches = matmul(by_embedded, w_embed.transpose(1, 2), summed=True, dtype=torch.float32).view(patches.shape)
    rows = patches.reshape(1, -1, patches.shape[2]).transpose(1, 2)
    grads = [
        matmul(rows, by_embedded) if needs[1] else None,
        by_embedded.sum(1) if needs[2] else None,
        matmul(tokens.transpose(1, 2), by_qkv).view(w_qkv.shape) if needs[3] else None,
        by_qkv.sum(1).view(b_qkv.shape) if needs[4] else None,
    ]
    return by_patches, [x for x in grads if x is not None]


def _one_expert(
    patches: torch.Tensor,
    weights: list[torch.Tensor],
    tokens: torch.Tensor,
    by_qkv: torch.Tensor,
    negative_slope: float,
    needs_patches: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The same of the expert in training, a launch per layer; weights' gradients laid out as nn.Linear keeps them."""
    w_embed, _, w_qkv, b_qkv = weights
    w = w_qkv[0].permute(1, 2, 3, 0)
    layer = (w.reshape(-1, w.shape[3]).contiguous(), by_qkv)
    by_embedded, (by_w, by_b) = layer_backward(tokens, [layer], LEAKY_BACKWARD, tokens.dtype, negative_slope)
    rows = patches.reshape(-1, patches.shape[2]).contiguous()
    layer = (w_embed[0].t().contiguous(), by_embedded)
    by_patches, (by_w_embed, by_b_embed) = layer_backward(
        rows, [layer], by_input=torch.float32 if needs_patches else None
    )
    by_weights = [by_w_embed.t()[None], by_b_embed[None], by_w.view(w.shape).permute(3, 0, 1, 2)[None]]
    return None if by_patches is None else by_patches.view(patches.shape), [*by_weights, by_b.view(b_qkv.shape)]
