"""The gradients of one small linear layer, of its input, weight and bias, in one launch: none waits for another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import matmul as matmuls
from .launch import ceil_div, dot_precision, launch
from .matmul import LEAKY_BACKWARD, RELU_BACKWARD, TANH_BACKWARD, product


@triton.jit
def _by_weight(
    grad,
    x,
    by_w,
    by_b,
    tile,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of by_w [OUTPUTS, INPUTS], and of by_b along its left edge; the batch is what is summed over."""
    columns = tl.cdiv(INPUTS, BLOCK_N)
    n = (tile // columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = product(total, grad, x, n, i, OUTPUTS, INPUTS, rows, 1, OUTPUTS, INPUTS, 1, BLOCK_D, PRECISION)
    where = by_w + n[:, None] * INPUTS + i[None, :]
    tl.store(where, total.to(by_w.dtype.element_ty), mask=(n < OUTPUTS)[:, None] & (i < INPUTS)[None, :])
    if tile % columns == 0:
        sums = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, rows, BLOCK_D):
            m = first + tl.arange(0, BLOCK_D)
            inside = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
            sums += tl.sum(tl.load(grad + m[:, None] * OUTPUTS + n[None, :], mask=inside, other=0).to(tl.float32), 0)
        tl.store(by_b + n, sums.to(by_b.dtype.element_ty), mask=n < OUTPUTS)


@triton.jit
def _by_input(
    grad,
    grad2,
    w,
    w2,
    x,
    by_x,
    tile,
    rows,
    negative_slope,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    THEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of by_x [rows, INPUTS]."""
    columns = tl.cdiv(INPUTS, BLOCK_N)
    m = (tile // columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = product(total, grad, w, m, i, rows, INPUTS, OUTPUTS, OUTPUTS, 1, INPUTS, 1, BLOCK_D, PRECISION)
    if PAIRS == 2:
        total = product(total, grad2, w2, m, i, rows, INPUTS, OUTPUTS, OUTPUTS, 1, INPUTS, 1, BLOCK_D, PRECISION)
    inside = (m < rows)[:, None] & (i < INPUTS)[None, :]
    where = m[:, None] * INPUTS + i[None, :]
    if THEN == TANH_BACKWARD:
        y = tl.load(x + where, mask=inside, other=0).to(tl.float32)
        total *= 1 - y * y
    if THEN == RELU_BACKWARD:
        total = tl.where(tl.load(x + where, mask=inside, other=0) > 0, total, 0)
    if THEN == LEAKY_BACKWARD:
        total = tl.where(tl.load(x + where, mask=inside, other=0) > 0, total, total * negative_slope)
    tl.store(by_x + where, total.to(by_x.dtype.element_ty), mask=inside)


@triton.jit
def _layer_backward(
    grad,
    grad2,
    w,
    w2,
    x,
    by_x,
    by_w,
    by_b,
    by_w2,
    by_b2,
    rows,
    of_weight,
    negative_slope,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BY_INPUT: tl.constexpr,
    THEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grad [rows, OUTPUTS] of x [rows, INPUTS] @ w.T, w [OUTPUTS, INPUTS]; of two such layers over one x, PAIRS == 2.

    The first `of_weight` programs make tiles of the weight's gradient, then as many those of the second layer's, the
    rest those of by_x. THEN: by_x becomes the gradient of what came before the activation whose output x is.
    """
    tile = tl.program_id(0)
    if tile < of_weight:
        _by_weight(grad, x, by_w, by_b, tile, rows, INPUTS, OUTPUTS, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)
    tile -= of_weight
    if PAIRS == 2:
        if (tile >= 0) & (tile < of_weight):
            _by_weight(grad2, x, by_w2, by_b2, tile, rows, INPUTS, OUTPUTS, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)
        tile -= of_weight
    if BY_INPUT:
        if tile >= 0:
            _by_input(
                grad,
                grad2,
                w,
                w2,
                x,
                by_x,
                tile,
                rows,
                negative_slope,
                INPUTS,
                OUTPUTS,
                PAIRS,
                THEN,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                PRECISION,
            )


def layer_backward(
    x: torch.Tensor,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    then: tl.constexpr = matmuls.NONE,
    by_input: torch.dtype | None = None,
    negative_slope: float = 0.0,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gradients behind one linear layer, or two of the same sizes that share their input.

    Args:
        x: `[M,I]`, the layers' input; it, weights and gradients are dense.
        layers: of each, the weight `[O,I]` and the gradient `[M,O]` of its output.
        then: TANH_BACKWARD, RELU_BACKWARD or LEAKY_BACKWARD where x is the output of that activation.
        by_input: dtype of the input's gradient, None where nobody asks for it.
        negative_slope: of a LeakyReLU.

    Returns:
        The gradient of the input, or of what its activation was given, `[M,I]`; weight's and bias's of every layer.
    """
    (w, grad), (w2, grad2) = layers[0], layers[1] if len(layers) > 1 else (None, None)
    rows, (outputs, inputs) = len(x), w.shape
    by_x = None if by_input is None else x.new_empty(rows, inputs, dtype=by_input)
    grads = [new for weight, _ in layers for new in (weight.new_empty(outputs, inputs), weight.new_empty(outputs))]
    tile = matmuls.tile(max(rows, outputs), x.dtype, len(layers))
    columns = ceil_div(inputs, tile["BLOCK_N"])
    of_input = 0 if by_x is None else ceil_div(rows, tile["BLOCK_M"]) * columns
    of_weight = ceil_div(outputs, tile["BLOCK_M"]) * columns
    launch(
        _layer_backward,
        (of_input + len(layers) * of_weight,),
        *(grad, grad2, w, w2, x, by_x, *grads, *(() if len(layers) > 1 else (None, None))),
        *(rows, of_weight, negative_slope),
        INPUTS=inputs,
        OUTPUTS=outputs,
        PAIRS=len(layers),
        BY_INPUT=by_x is not None,
        THEN=then.value,
        PRECISION=dot_precision(x.dtype),
        **tile,
    )
    return by_x, grads
