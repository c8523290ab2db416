"""batch_norm_fold: the covariance of the batch, then everything about one output of the map in one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import matmul as matmuls
from .launch import ceil_div, dot_precision, launch, power_of_two

ROWS = 16  # outputs of the map in one program: the least that matrix units take


@triton.jit
def _mean(x, columns, rows, stride_r, stride_p, PIXELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows, BLOCK_R):
        r = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        where = x + r[:, None] * stride_r + columns[None, :] * stride_p
        total += tl.sum(
            tl.load(where, mask=(r < rows)[:, None] & (columns < PIXELS)[None, :], other=0).to(tl.float32), 0
        )
    return total / rows


@triton.jit
def _covariance(
    x,
    mean,
    covariance,
    rows,
    stride_r,
    stride_p,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [rows, PIXELS] -> mean [PIXELS], covariance [PIXELS, PIXELS]; centred first: pixels may vary little."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean_i = _mean(x, i, rows, stride_r, stride_p, PIXELS, BLOCK_R, BLOCK)
    mean_j = _mean(x, j, rows, stride_r, stride_p, PIXELS, BLOCK_R, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, rows, BLOCK_R):
        r = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        here = (r < rows)[:, None]
        inside = here & (i < PIXELS)[None, :]
        left = tl.load(x + r[:, None] * stride_r + i[None, :] * stride_p, mask=inside, other=0).to(tl.float32)
        left = tl.where(inside, left - mean_i[None, :], 0)
        inside = here & (j < PIXELS)[None, :]
        right = tl.load(x + r[:, None] * stride_r + j[None, :] * stride_p, mask=inside, other=0).to(tl.float32)
        right = tl.where(inside, right - mean_j[None, :], 0)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    inside = (i < PIXELS)[:, None] & (j < PIXELS)[None, :]
    tl.store(covariance + i[:, None] * PIXELS + j[None, :], total / rows, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(mean + i, mean_i, mask=i < PIXELS)


@triton.jit
def _fold(
    weight,
    gain,
    shift,
    bias,
    mean,
    covariance,
    running_mean,
    running_var,
    batches,
    w,
    b,
    weighted,
    center,
    deviation,
    rows,
    momentum,
    epsilon,
    PIXELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: ROWS outputs."""
    q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = q < OUTPUTS
    variance = tl.zeros((ROWS,), tl.float32)
    middle = tl.zeros((ROWS,), tl.float32)
    for first in range(0, PIXELS, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = here[:, None] & (j < PIXELS)[None, :]
        where = q[:, None] * PIXELS + j[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for inner in range(0, PIXELS, BLOCK_D):
            i = inner + tl.arange(0, BLOCK_D)
            left = weight + q[:, None] * PIXELS + i[None, :]
            left = tl.load(left, mask=here[:, None] & (i < PIXELS)[None, :], other=0).to(tl.float32)
            right = covariance + i[:, None] * PIXELS + j[None, :]
            right = tl.load(right, mask=(i < PIXELS)[:, None] & (j < PIXELS)[None, :], other=0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        tl.store(weighted + where, total, mask=inside)
        own = tl.load(weight + where, mask=inside, other=0).to(tl.float32)
        variance += tl.sum(total * own, 1)
        middle += tl.sum(own * tl.load(mean + j, mask=j < PIXELS, other=0)[None, :], 1)
    spread = tl.rsqrt(variance + epsilon)
    scale = tl.load(gain + q, mask=here, other=0).to(tl.float32) * spread
    tl.store(deviation + q, spread, mask=here)
    tl.store(center + q, middle, mask=here)
    offset = tl.load(shift + q, mask=here, other=0).to(tl.float32) - middle * scale
    tl.store(b + q, offset.to(b.dtype.element_ty), mask=here)
    for first in range(0, PIXELS, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = here[:, None] & (j < PIXELS)[None, :]
        where = q[:, None] * PIXELS + j[None, :]
        own = tl.load(weight + where, mask=inside, other=0).to(tl.float32)
        tl.store(w + where, (own * scale[:, None]).to(w.dtype.element_ty), mask=inside)
    then = tl.load(running_mean + q, mask=here, other=0).to(tl.float32)
    now = middle + tl.load(bias + q, mask=here, other=0).to(tl.float32)
    tl.store(running_mean + q, (then + momentum * (now - then)).to(running_mean.dtype.element_ty), mask=here)
    then = tl.load(running_var + q, mask=here, other=0).to(tl.float32)
    now = variance * (rows / (rows - 1.0))
    tl.store(running_var + q, (then + momentum * (now - then)).to(running_var.dtype.element_ty), mask=here)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _fold_backward(
    by_w,
    by_b,
    weight,
    gain,
    mean,
    weighted,
    center,
    deviation,
    by_weight,
    by_gain,
    stride_q,
    stride_p,
    stride_b,
    PIXELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS outputs."""
    q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = q < OUTPUTS
    upstream_b = tl.load(by_b + q * stride_b, mask=here, other=0).to(tl.float32)
    spread = tl.load(deviation + q, mask=here, other=0)
    scale = tl.load(gain + q, mask=here, other=0).to(tl.float32) * spread
    by_scale = -upstream_b * tl.load(center + q, mask=here, other=0)
    for first in range(0, PIXELS, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = here[:, None] & (j < PIXELS)[None, :]
        own = tl.load(weight + q[:, None] * PIXELS + j[None, :], mask=inside, other=0).to(tl.float32)
        upstream = tl.load(by_w + q[:, None] * stride_q + j[None, :] * stride_p, mask=inside, other=0).to(tl.float32)
        by_scale += tl.sum(own * upstream, 1)
    tl.store(by_gain + q, (by_scale * spread).to(by_gain.dtype.element_ty), mask=here)
    by_half_variance = by_scale * scale * spread * spread
    for first in range(0, PIXELS, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = here[:, None] & (j < PIXELS)[None, :]
        where = q[:, None] * PIXELS + j[None, :]
        upstream = tl.load(by_w + q[:, None] * stride_q + j[None, :] * stride_p, mask=inside, other=0).to(tl.float32)
        total = upstream * scale[:, None] - tl.load(weighted + where, mask=inside, other=0) * by_half_variance[:, None]
        total -= (upstream_b * scale)[:, None] * tl.load(mean + j, mask=j < PIXELS, other=0)[None, :]
        tl.store(by_weight + where, total.to(by_weight.dtype.element_ty), mask=inside)


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    weight = args[2 if op.endswith("_backward") else 1]
    return matmuls.too_many(max(weight.shape), weight.shape[1], "a matrix")


def batch_norm_fold(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    bias: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    momentum: float,
    epsilon: float,
) -> list[torch.Tensor]:
    """See levit_kernels.batch_norm_fold; -> as `batch_norm_fold_composed`."""
    weight, gain, shift, bias = (x.contiguous() for x in (weight, gain, shift, bias))
    outputs, pixels = weight.shape
    mean, covariance, weighted, center, deviation = (
        weight.new_empty(*shape, dtype=torch.float32)
        for shape in ((pixels,), (pixels, pixels), (outputs, pixels), (outputs,), (outputs,))
    )
    w, b = weight.new_empty(outputs, pixels), weight.new_empty(outputs)
    block = min(64, power_of_two(pixels, 16))
    sums = {"BLOCK": block, "PRECISION": dot_precision(torch.float32), "threads": 128}
    tiles = ceil_div(pixels, block)
    launch(_covariance, (tiles, tiles), x, mean, covariance, len(x), *x.stride(), PIXELS=pixels, BLOCK_R=32, **sums)
    launch(
        _fold,
        (ceil_div(outputs, ROWS),),
        *(weight, gain, shift, bias, mean, covariance, *running, w, b, weighted, center, deviation),
        *(len(x), momentum, epsilon),
        PIXELS=pixels,
        OUTPUTS=outputs,
        ROWS=ROWS,
        BLOCK_D=min(32, block),
        **sums,
    )
    return [w, b, mean, weighted, center, deviation]


def batch_norm_fold_backward(
    by_w: torch.Tensor,
    by_b: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    weighted: torch.Tensor,
    center: torch.Tensor,
    deviation: torch.Tensor,
) -> list[torch.Tensor]:
    """-> gradients of weight and gain."""
    weight, gain = weight.contiguous(), gain.contiguous()
    outputs, pixels = weight.shape
    by_weight, by_gain = weight.new_empty(outputs, pixels), weight.new_empty(outputs)
    launch(
        _fold_backward,
        (ceil_div(outputs, ROWS),),
        *(by_w, by_b, weight, gain, mean, weighted, center, deviation, by_weight, by_gain),
        *(*by_w.stride(), *by_b.stride()),
        PIXELS=pixels,
        OUTPUTS=outputs,
        ROWS=ROWS,
        BLOCK=min(64, power_of_two(pixels, 16)),
        threads=128,
    )
    return [by_weight, by_gain]
