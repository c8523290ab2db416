"""dkf_fuse: the store's rows are read where they lie, once for the sum and once for the gradient of the gates.

A row's [N, E] is one flat run of numbers wherever its memory allows, so that every access takes 16 bytes, whatever the
width of a head. Several experts are read at a time to keep enough loads in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import gates as gating
from .launch import ceil_div, launch, power_of_two

BLOCK = 1024  # numbers per program and expert: with 4 warps two 16-byte loads of float32 per thread
BLOCK_K = 4  # experts read at a time


@triton.jit
def _offsets(r, width, stride_n, stride_e, FLAT: tl.constexpr):
    """Where the r-th number of an [N, E] lies."""
    if FLAT:
        where = r
    else:
        where = (r // width).to(tl.int64) * stride_n + (r % width).to(tl.int64) * stride_e
    return where


@triton.jit(debug=True)  # for the assertion; compiled without checks of integer overflow, see _OPTIONS
def _stored_row(index, b, rows, stride_i, INDEXED: tl.constexpr):
    row = b
    if INDEXED:
        row = tl.load(index + b * stride_i)
        tl.device_assert((row >= 0) & (row < rows), "dkf_fuse: index must lie in [0, M)")
    return row


@triton.jit(debug=True)
def _fuse(
    features,
    gates,
    index,
    out,
    rows,
    experts,
    numbers,
    width,
    depth,
    stride_fm,
    stride_fk,
    stride_fn,
    stride_fe,
    stride_gb,
    stride_gk,
    stride_gh,
    stride_i,
    HEADS: tl.constexpr,
    FLAT: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK numbers of one image's [N, E]."""
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = r < numbers
    head = (r % width) // depth
    row = _stored_row(index, b, rows, stride_i, INDEXED)
    store = features + row * stride_fm + _offsets(r, width, stride_fn, stride_fe, FLAT)
    gates += b * stride_gb
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, experts, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
        if HEADS == 1:
            gate = tl.load(gates + k * stride_gk, mask=k < experts, other=0).to(tl.float32)[:, None]
            used = gate != 0
        else:
            # whole experts are skipped by a mask that is the same for a whole row, or loads would shrink to one number
            h = tl.arange(0, BLOCK_H)
            every = gates + (k * stride_gk)[:, None] + (h * stride_gh)[None, :]
            every = tl.load(every, mask=(k < experts)[:, None] & (h < HEADS)[None, :], other=0)
            used = tl.max((every != 0).to(tl.int32), 1)[:, None] > 0
            gate = tl.load(gates + (k * stride_gk)[:, None] + (head * stride_gh)[None, :], mask=used, other=0)
            gate = gate.to(tl.float32)
        stored = tl.load(store[None, :] + (k * stride_fk)[:, None], mask=used & inside[None, :], other=0)
        total += tl.sum(tl.where(gate != 0, gate * stored.to(tl.float32), 0), 0)
    tl.store(out + b * numbers + r, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(debug=True)
def _by_gates(
    grad,
    features,
    index,
    out,
    rows,
    experts,
    numbers,
    width,
    depth,
    stride_db,
    stride_dn,
    stride_de,
    stride_fm,
    stride_fk,
    stride_fn,
    stride_fe,
    stride_i,
    HEADS: tl.constexpr,
    FLAT: tl.constexpr,
    FLAT_GRAD: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: <grad, features> of one image and BLOCK_K experts, head by head."""
    b = tl.program_id(0).to(tl.int64)
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    row = _stored_row(index, b, rows, stride_i, INDEXED)
    store = features + row * stride_fm + (k * stride_fk)[:, None]
    if HEADS == 1:
        total = tl.zeros((BLOCK_K, BLOCK), tl.float32)
    else:
        total = tl.zeros((BLOCK_K, BLOCK_H, BLOCK), tl.float32)
    for first in range(0, numbers, BLOCK):
        r = first + tl.arange(0, BLOCK)
        inside = r < numbers
        upstream = grad + b * stride_db + _offsets(r, width, stride_dn, stride_de, FLAT_GRAD)
        upstream = tl.load(upstream, mask=inside, other=0).to(tl.float32)
        stored = store + _offsets(r, width, stride_fn, stride_fe, FLAT)[None, :]
        stored = tl.load(stored, mask=(k < experts)[:, None] & inside[None, :], other=0).to(tl.float32)
        product = stored * upstream[None, :]
        if HEADS == 1:
            total += product
        else:
            head = (r % width) // depth
            total += tl.where(head[None, None, :] == h[None, :, None], product[:, None, :], 0)
    if HEADS == 1:
        tl.store(out + b * experts + k, tl.sum(total, 1), mask=k < experts)
    else:
        where = out + (b * experts + k)[:, None] * HEADS + h[None, :]
        tl.store(where, tl.sum(total, 2), mask=(k < experts)[:, None] & (h < HEADS)[None, :])


@triton.jit
def _by_features(
    grad,
    gates,
    order,
    starts,
    out,
    experts,
    numbers,
    width,
    depth,
    stride_db,
    stride_dn,
    stride_de,
    stride_gb,
    stride_gk,
    stride_gh,
    FLAT_GRAD: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK numbers of one row and expert, summed over the images that read the row, in their order."""
    m = tl.program_id(0).to(tl.int64) // experts
    k = tl.program_id(0).to(tl.int64) % experts
    r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = r < numbers
    head = (r % width) // depth
    grad += _offsets(r, width, stride_dn, stride_de, FLAT_GRAD)
    gates += k * stride_gk + head * stride_gh
    total = tl.zeros((BLOCK,), tl.float32)
    if INDEXED:
        for i in range(tl.load(starts + m), tl.load(starts + m + 1)):
            b = tl.load(order + i)
            gate = tl.load(gates + b * stride_gb, mask=inside, other=0).to(tl.float32)
            total += gate * tl.load(grad + b * stride_db, mask=inside, other=0).to(tl.float32)
    else:
        gate = tl.load(gates + m * stride_gb, mask=inside, other=0).to(tl.float32)
        total += gate * tl.load(grad + m * stride_db, mask=inside, other=0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * numbers + r, total.to(out.dtype.element_ty), mask=inside)


_OPTIONS = {"threads": 128, "sanitize_overflow": False}
MOST_HEADS = 64


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    heads = gating.expand(args[1 if op == "dkf_fuse" else 2]).shape[2]
    return f"takes gates of at most H = {MOST_HEADS} heads, got {heads}" if heads > MOST_HEADS else None


def dkf_fuse(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """See levit_kernels.dkf_fuse."""
    rows, experts, length, width = features.shape
    per_image = gating.expand(gates)
    batch, heads = rows if index is None else len(index), per_image.shape[2]
    out = features.new_empty(batch, length, width, dtype=torch.promote_types(features.dtype, gates.dtype))
    launch(
        _fuse,
        (batch, ceil_div(length * width, BLOCK)),
        *(features, per_image, index, out, rows, experts, length * width, width, width // heads),
        *features.stride(),
        *gating.broadcast_strides(per_image),
        0 if index is None else index.stride(0),
        HEADS=heads,
        FLAT=_is_flat(features),
        INDEXED=index is not None,
        BLOCK_K=BLOCK_K,
        BLOCK_H=power_of_two(heads),
        BLOCK=BLOCK,
        **_OPTIONS,
    )
    return out


def dkf_fuse_backward(
    grad: torch.Tensor,
    features: torch.Tensor,
    gates: torch.Tensor,
    index: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of features and gates, those that `needs` names."""
    grads = []
    if needs[0]:
        grads.append(_feature_gradient(grad, features, gating.expand(gates), index))
    if needs[1]:
        grads.append(gating.reduce_like(_gate_gradient(grad, features, gating.expand(gates), index), gates))
    return grads


def _gate_gradient(
    grad: torch.Tensor, features: torch.Tensor, per_image: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """-> `[B,K,H or 1]` in float32."""
    rows, experts, length, width = features.shape
    heads = per_image.shape[2]
    block_h = power_of_two(heads)
    out = features.new_empty(len(grad), experts, heads, dtype=torch.float32)
    block_k = min(2, power_of_two(experts))
    launch(
        _by_gates,
        (len(grad), ceil_div(experts, block_k)),
        *(grad, features, index, out, rows, experts, length * width, width, width // heads),
        *grad.stride(),
        *features.stride(),
        0 if index is None else index.stride(0),
        HEADS=heads,
        FLAT=_is_flat(features),
        FLAT_GRAD=_is_flat(grad),
        INDEXED=index is not None,
        BLOCK_K=block_k,
        BLOCK_H=block_h,
        BLOCK=max(BLOCK // block_h, 32),
        **_OPTIONS,
    )
    return out


def _feature_gradient(
    grad: torch.Tensor, features: torch.Tensor, per_image: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    rows, experts, length, width = features.shape
    out = features.new_empty(features.shape)
    order = starts = None
    if index is not None:  # the images of each row side by side, so that no two programs add to one number
        order = torch.argsort(index, stable=True)
        starts = torch.searchsorted(index[order], torch.arange(rows + 1, device=index.device))
    launch(
        _by_features,
        (rows * experts, ceil_div(length * width, BLOCK)),
        *(grad, per_image, order, starts, out, experts, length * width, width, width // per_image.shape[2]),
        *grad.stride(),
        *gating.broadcast_strides(per_image),
        FLAT_GRAD=_is_flat(grad),
        INDEXED=index is not None,
        BLOCK=BLOCK,
        threads=128,
    )
    return out


def _is_flat(x: torch.Tensor) -> bool:
    """Whether the last two dimensions are one dense run."""
    return x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
