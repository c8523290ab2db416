"""Products of stacked matrices with what follows them: the layers of K small networks, forward and backward.

Views do the transposing, so one kernel serves x @ w, grad @ w.T and x.T @ grad. Strides within a matrix are constants
of the compiler: only then does it know that rows of 200 numbers may be read 16 bytes at a time. Every output is summed
by one program in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dot_precision, launch, near, power_of_two

NONE, TANH, RELU, LEAKY, TANH_BACKWARD, RELU_BACKWARD, LEAKY_BACKWARD = (tl.constexpr(i) for i in range(7))


@triton.jit
def tanh(x):
    """A series near zero, where the exponentials would cancel; within 3 units in the last place of float32."""
    y = x * x
    series = x * (1 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488))))
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(y < 0.0625, series, tl.where(x < 0, -1.0, 1.0) * ((1 - e) / (1 + e)))


@triton.jit
def product(
    total,
    a,
    b,
    m,
    n,
    most_m,
    most_n,
    depth,
    SA_M: tl.constexpr,
    SA_D: tl.constexpr,
    SB_D: tl.constexpr,
    SB_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + a[m, :depth] @ b[:depth, n], in float32; offsets within a matrix fit 32 bits, which saves registers."""
    for first in range(0, depth, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        left = tl.load(
            a + m[:, None] * SA_M + d[None, :] * SA_D, mask=(m < most_m)[:, None] & (d < depth)[None, :], other=0
        )
        right = tl.load(
            b + d[:, None] * SB_D + n[None, :] * SB_N, mask=(d < depth)[:, None] & (n < most_n)[None, :], other=0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def _matmul(
    a,
    b,
    a2,
    b2,
    bias,
    saved,
    out,
    most_m,
    most_n,
    depth,
    experts,
    negative_slope,
    stride_ak,
    stride_bk,
    stride_a2k,
    stride_b2k,
    stride_bias_k,
    stride_bias_n,
    SA_M: tl.constexpr,
    SA_D: tl.constexpr,
    SB_D: tl.constexpr,
    SB_N: tl.constexpr,
    SA2_M: tl.constexpr,
    SA2_D: tl.constexpr,
    SB2_D: tl.constexpr,
    SB2_N: tl.constexpr,
    PAIRS: tl.constexpr,
    SUMMED: tl.constexpr,
    BIASED: tl.constexpr,
    THEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [K,M,N] = then(a [K,M,D] @ b [K,D,N] + a2 @ b2 + bias [K,N]); SUMMED: over K, out [1,M,N]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SUMMED:
        for i in range(0, experts):
            k = first + i
            x, w = a + k * stride_ak, b + k * stride_bk
            total = product(total, x, w, m, n, most_m, most_n, depth, SA_M, SA_D, SB_D, SB_N, BLOCK_D, PRECISION)
    else:
        x, w = a + first * stride_ak, b + first * stride_bk
        total = product(total, x, w, m, n, most_m, most_n, depth, SA_M, SA_D, SB_D, SB_N, BLOCK_D, PRECISION)
    if PAIRS == 2:
        x, w = a2 + first * stride_a2k, b2 + first * stride_b2k
        total = product(total, x, w, m, n, most_m, most_n, depth, SA2_M, SA2_D, SB2_D, SB2_N, BLOCK_D, PRECISION)
    if BIASED:
        shift = tl.load(bias + first * stride_bias_k + n * stride_bias_n, mask=n < most_n, other=0)
        total += shift.to(tl.float32)[None, :]
    inside = (m < most_m)[:, None] & (n < most_n)[None, :]
    dense = (first * most_m + m.to(tl.int64))[:, None] * most_n + n[None, :]
    if THEN == TANH:
        total = tanh(total)
    if THEN == RELU:
        total = tl.where(total < 0, 0, total)  # keeps NaN
    if THEN == LEAKY:
        total = tl.where(total > 0, total, total * negative_slope)
    if THEN >= TANH_BACKWARD:
        y = tl.load(saved + dense, mask=inside, other=0).to(tl.float32)
        if THEN == TANH_BACKWARD:
            total *= 1 - y * y
        if THEN == RELU_BACKWARD:
            total = tl.where(y > 0, total, 0)
        if THEN == LEAKY_BACKWARD:
            total = tl.where(y > 0, total, total * negative_slope)
    tl.store(out + dense, total.to(out.dtype.element_ty), mask=inside)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    then: tl.constexpr = NONE,
    saved: torch.Tensor | None = None,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    summed: bool = False,
    negative_slope: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """a `[K or 1,M,D]` @ b `[K,D,N]` (+ second) + bias `[K,N]`, then the activation or, with the layer's dense output
    `saved`, its derivative -> `[K,M,N]`, or `[1,M,N]` summed over K.
    """
    a, b = near(a), near(b)
    second = second and (near(second[0]), near(second[1]))
    experts, (rows, depth), columns = len(b), a.shape[1:], b.shape[2]
    out = a.new_empty(1 if summed else experts, rows, columns, dtype=dtype or a.dtype)
    a2, b2 = second or (None, None)
    launch(
        _matmul,
        (ceil_div(rows, 64), ceil_div(columns, 64), len(out)),
        *(a, b, a2, b2, bias, saved, out, rows, columns, depth, experts, negative_slope),
        *(stride_k(a), b.stride(0), *((a2.stride(0), b2.stride(0)) if second else (0, 0))),
        *((0, 0) if bias is None else bias.stride()),
        **strides(a, b),
        **(strides(a2, b2, "2") if second else dict.fromkeys(("SA2_M", "SA2_D", "SB2_D", "SB2_N"), 0)),
        PAIRS=1 + (second is not None),
        SUMMED=summed,
        BIASED=bias is not None,
        THEN=then.value,
        **tile(depth, a.dtype, 1 + (second is not None)),
        PRECISION=dot_precision(a.dtype),
    )
    return out


MOST_NUMBERS = 2**31 - 1


def too_many(rows: int, columns: int, what: str) -> str | None:
    """Why a matrix [rows, columns] is too large for 32-bit offsets, or None."""
    if rows * columns <= MOST_NUMBERS:
        return None
    return f"takes at most {MOST_NUMBERS} numbers in {what}, got {rows} x {columns}"


def stride_k(x: torch.Tensor) -> int:
    """0 where one matrix serves all experts."""
    return x.stride(0) if len(x) > 1 else 0


def strides(a: torch.Tensor, b: torch.Tensor, which: str = "") -> dict[str, int]:
    """Within the matrices, under the names that the kernels give them."""
    names = (f"SA{which}_M", f"SA{which}_D", f"SB{which}_D", f"SB{which}_N")
    return dict(zip(names, (*a.stride()[1:], *b.stride()[1:]), strict=True))


def tile(depth: int, dtype: torch.dtype, pairs: int = 1) -> dict[str, int]:
    """The default configuration; float32 numbers, cut in two for the matrix units, take twice the registers.

    128 threads would do for 16-bit numbers, but some layouts then spill on sm_80 and sm_100.
    """
    wide = dtype == torch.float32
    block_d = min(16 if wide and pairs > 1 else 32, power_of_two(depth, 16))
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": block_d, "threads": 256}
