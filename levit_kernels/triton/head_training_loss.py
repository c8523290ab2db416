"""head_training_loss: torch's products forward; batch norm, the loss and every layer's gradients in a launch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .._loss import LossWithGradients
from ..head_training import NO_LABEL, head_training_loss_reference
from . import matmul as matmuls
from .launch import ceil_div, launch, power_of_two
from .layer_backward import layer_backward

_NONE = tl.constexpr(NO_LABEL)
MOST_CLASSES = 4096
COLUMNS = 16  # of batch norm in one program
ROWS = 64  # at a time


@triton.jit
def _tile(first, rows, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Offsets into [rows, columns] of a program's columns in the rows from `first` on; which of them exist."""
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    return m[:, None] * columns + n[None, :], (m < rows)[:, None] & (n < columns)[None, :]


@triton.jit
def _normalise(
    z,
    gain,
    shift,
    y,
    statistics,
    spread,
    rows,
    columns,
    negative_slope,
    epsilon,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Batch norm and LeakyReLU, z [rows, columns] -> y; statistics [2, columns] and 1 / deviation [columns]."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = n < columns
    mean = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        where, inside = _tile(first, rows, columns, COLUMNS, ROWS)
        mean += tl.sum(tl.load(z + where, mask=inside, other=0).to(tl.float32), 0)
    mean /= rows
    variance = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        where, inside = _tile(first, rows, columns, COLUMNS, ROWS)
        centred = tl.where(inside, tl.load(z + where, mask=inside, other=0).to(tl.float32) - mean[None, :], 0)
        variance += tl.sum(centred * centred, 0)
    variance /= rows
    by_deviation = tl.rsqrt(variance + epsilon)
    tl.store(statistics + n, mean, mask=here)
    tl.store(statistics + columns + n, variance, mask=here)
    tl.store(spread + n, by_deviation, mask=here)
    scale = by_deviation * tl.load(gain + n, mask=here, other=0).to(tl.float32)
    offset = tl.load(shift + n, mask=here, other=0).to(tl.float32)
    for first in range(0, rows, ROWS):
        where, inside = _tile(first, rows, columns, COLUMNS, ROWS)
        normal = (tl.load(z + where, mask=inside, other=0).to(tl.float32) - mean[None, :]) * scale[None, :]
        normal += offset[None, :]
        normal = tl.where(normal < 0, normal * negative_slope, normal)
        tl.store(y + where, normal.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _upstream(
    by_y, z, mean, spread, scale, shift, first, rows, columns, negative_slope, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """The gradient behind LeakyReLU and the normalised z, and where both belong."""
    where, inside = _tile(first, rows, columns, COLUMNS, ROWS)
    normal = (tl.load(z + where, mask=inside, other=0).to(tl.float32) - mean[None, :]) * spread[None, :]
    grad = tl.load(by_y + where, mask=inside, other=0).to(tl.float32)
    grad = tl.where(normal * scale[None, :] + shift[None, :] > 0, grad, grad * negative_slope)
    return where, inside, tl.where(inside, grad, 0), tl.where(inside, normal, 0)


@triton.jit
def _normalise_backward(
    by_y,
    z,
    statistics,
    spread,
    gain,
    shift,
    by_z,
    by_gain,
    by_shift,
    rows,
    columns,
    negative_slope,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """by_y [rows, columns] -> gradients of z, gain and shift."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = n < columns
    mean, by_deviation = tl.load(statistics + n, mask=here, other=0), tl.load(spread + n, mask=here, other=0)
    scale = tl.load(gain + n, mask=here, other=0).to(tl.float32)
    offset = tl.load(shift + n, mask=here, other=0).to(tl.float32)
    of_shift = tl.zeros((COLUMNS,), tl.float32)
    of_gain = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        where, inside, grad, normal = _upstream(
            by_y, z, mean, by_deviation, scale, offset, first, rows, columns, negative_slope, COLUMNS, ROWS
        )
        of_shift += tl.sum(grad, 0)
        of_gain += tl.sum(grad * normal, 0)
    tl.store(by_gain + n, of_gain.to(by_gain.dtype.element_ty), mask=here)
    tl.store(by_shift + n, of_shift.to(by_shift.dtype.element_ty), mask=here)
    scale_z = scale * by_deviation
    for first in range(0, rows, ROWS):
        where, inside, grad, normal = _upstream(
            by_y, z, mean, by_deviation, scale, offset, first, rows, columns, negative_slope, COLUMNS, ROWS
        )
        grad -= (of_shift[None, :] + normal * of_gain[None, :]) / rows
        tl.store(by_z + where, (grad * scale_z[None, :]).to(by_z.dtype.element_ty), mask=inside)


@triton.jit
def _cross_entropy(
    logits, labels, loss, by_logits, rows, stride_l, CLASSES: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):
    """logits [rows, CLASSES] -> their mean loss over the labelled rows and its gradient, in one program."""
    c = tl.arange(0, BLOCK_C)
    labelled = 0
    for first in range(0, rows, ROWS):
        m = first + tl.arange(0, ROWS)
        labelled += tl.sum((tl.load(labels + m * stride_l, mask=m < rows, other=_NONE) != _NONE).to(tl.int32), 0)
    share = 1.0 / tl.maximum(labelled, 1)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, rows, ROWS):
        m = first + tl.arange(0, ROWS)
        label = tl.load(labels + m * stride_l, mask=m < rows, other=_NONE)
        inside = (m < rows)[:, None] & (c < CLASSES)[None, :]
        where = m[:, None] * CLASSES + c[None, :]
        x = tl.load(logits + where, mask=inside, other=0).to(tl.float32)
        x = tl.where((c < CLASSES)[None, :], x, float("-inf"))
        x -= tl.max(x, 1)[:, None]
        e = tl.exp(x)
        sums = tl.sum(e, 1)
        own = c[None, :] == label[:, None]
        used = label != _NONE
        total += tl.where(used, tl.log(sums) - tl.sum(tl.where(own, x, 0), 1), 0)
        grad = tl.where(used[:, None], e / sums[:, None] - own.to(tl.float32), 0) * share
        tl.store(by_logits + where, grad.to(by_logits.dtype.element_ty), mask=inside)
    tl.store(loss, (tl.sum(total, 0) * share).to(loss.dtype.element_ty))


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    features, _, weights = args[:3]
    if len(weights[-1]) > MOST_CLASSES:
        return f"takes at most C = {MOST_CLASSES}, got {len(weights[-1])}"
    widest = max(features.shape[1], *map(len, weights))
    return matmuls.too_many(max(len(features), *map(len, weights)), widest, "a layer")


def head_training_loss(
    features: torch.Tensor,
    labels: torch.Tensor,
    weights: Sequence[torch.Tensor],
    negative_slope: float,
    epsilon: float,
    bf16: bool = False,
) -> tuple[torch.Tensor, ...]:
    """See levit_kernels.head_training; without gradients to compute it is left to torch."""
    if not torch.is_grad_enabled():
        return head_training_loss_reference(features, labels, weights, negative_slope, epsilon)
    x, *dense = (x.detach().contiguous() for x in (features, *weights))

    def compute() -> list[torch.Tensor]:
        return _loss_and_gradients(x, labels, dense, negative_slope, epsilon)

    return LossWithGradients.apply(compute, False, features, *weights)


def _loss_and_gradients(
    x: torch.Tensor, labels: torch.Tensor, weights: list[torch.Tensor], negative_slope: float, epsilon: float
) -> list[torch.Tensor]:
    """-> the loss, gradients of features and weights, statistics; features and weights are dense."""
    layers, statistics = [], []
    for i in range(0, len(weights) - 2, 3):
        w, gain, shift = weights[i : i + 3]
        z = x @ w.t()
        y = z.new_empty(z.shape)
        found, spread = (z.new_empty(*shape, len(w), dtype=torch.float32) for shape in ((2,), ()))
        launch(
            _normalise,
            (ceil_div(len(w), COLUMNS),),
            *(z, gain, shift, y, found, spread, *z.shape, negative_slope, epsilon),
            COLUMNS=COLUMNS,
            ROWS=ROWS,
            threads=128,
        )
        layers.append((x, w, z, gain, shift, found, spread))
        statistics += found.to(x.dtype).unbind()
        x = y
    w, b = weights[-2:]
    logits = torch.addmm(b, x, w.t())
    loss, by_logits = logits.new_empty(()), logits.new_empty(logits.shape)
    block_c = power_of_two(len(w))
    launch(
        _cross_entropy,
        (1,),
        *(logits, labels, loss, by_logits, len(x), labels.stride(0)),
        CLASSES=len(w),
        BLOCK_C=block_c,
        ROWS=max(1, min(32, 4096 // block_c)),
        threads=128,
    )
    by_x, grads = layer_backward(x, [(w, by_logits)], by_input=x.dtype)
    for x, w, z, gain, shift, found, spread in reversed(layers):
        by_z, by_gain, by_shift = (new.new_empty(new.shape) for new in (z, gain, shift))
        launch(
            _normalise_backward,
            (ceil_div(len(w), COLUMNS),),
            *(by_x, z, found, spread, gain, shift, by_z, by_gain, by_shift, *z.shape, negative_slope),
            COLUMNS=COLUMNS,
            ROWS=ROWS,
            threads=128,
        )
        by_x, (by_w, _) = layer_backward(x, [(w, by_z)], by_input=x.dtype)
        grads = [by_w, by_gain, by_shift, *grads]
    return [loss, by_x, *grads, *statistics]
