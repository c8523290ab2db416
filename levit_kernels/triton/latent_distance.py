"""latent_distance: one read of the codes; programs write partial sums, which are added in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import ceil_div, launch, power_of_two

BLOCK = 1024  # numbers of a tile: 8 per thread, of which several are held
MOST_LATENT = 1024


@triton.jit
def load_rows(x, rows, most_rows, columns, most_columns, stride_row, stride_column):
    """The tile [rows, columns] in float32, zero outside of it."""
    where = x + (rows.to(tl.int64) * stride_row)[:, None] + (columns.to(tl.int64) * stride_column)[None, :]
    return tl.load(where, mask=(rows < most_rows)[:, None] & (columns < most_columns)[None, :], other=0).to(tl.float32)


@triton.jit
def _distance(
    codes,
    query,
    partial,
    samples,
    latent,
    stride_ck,
    stride_cm,
    stride_cl,
    stride_qm,
    stride_ql,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """partial [K, blocks]: one program sums the distances of BLOCK_M samples to one expert's codes."""
    k = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_L)
    code = load_rows(codes + k.to(tl.int64) * stride_ck, m, samples, c, latent, stride_cm, stride_cl)
    difference = code - load_rows(query, m, samples, c, latent, stride_qm, stride_ql)
    distance = tl.sqrt_rn(tl.sum(difference * difference, 1))
    tl.store(partial + k * tl.num_programs(1) + tl.program_id(1), tl.sum(distance, 0) / samples)


@triton.jit
def _directions(
    grad,
    codes,
    query,
    by_codes,
    by_query,
    experts,
    samples,
    latent,
    stride_d,
    stride_ck,
    stride_cm,
    stride_cl,
    stride_qm,
    stride_ql,
    BY_CODES: tl.constexpr,
    BY_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One program: BLOCK_M samples of all experts, the query's gradient summed over them."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_L)
    inside = (m < samples)[:, None] & (c < latent)[None, :]
    dense = m.to(tl.int64)[:, None] * latent + c[None, :]
    near = load_rows(query, m, samples, c, latent, stride_qm, stride_ql)
    total = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    for i in range(0, experts):
        k = tl.zeros((), tl.int64) + i
        difference = load_rows(codes + k * stride_ck, m, samples, c, latent, stride_cm, stride_cl) - near
        distance = tl.sqrt_rn(tl.sum(difference * difference, 1))[:, None]
        weight = tl.load(grad + k * stride_d).to(tl.float32) / samples
        direction = weight * (difference / tl.where(distance == 0, 1, distance))
        if BY_CODES:
            where = by_codes + k * samples * latent + dense
            tl.store(where, direction.to(by_codes.dtype.element_ty), mask=inside)
        total -= direction
    if BY_QUERY:
        tl.store(by_query + dense, total.to(by_query.dtype.element_ty), mask=inside)


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    latent = args[-2 if op.endswith("_backward") else -1].shape[1]
    return f"takes at most L = {MOST_LATENT}, got {latent}" if latent > MOST_LATENT else None


def latent_distance(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """See levit_kernels.latent_distance."""
    experts, samples, latent = codes.shape
    block_m, block_l = _tile(samples, latent)
    partial = codes.new_empty(experts, ceil_div(samples, block_m), dtype=torch.float32)
    launch(
        _distance,
        tuple(partial.shape),
        *(codes, query, partial, samples, latent),
        *codes.stride(),
        *query.stride(),
        BLOCK_M=block_m,
        BLOCK_L=block_l,
        threads=128,
    )
    return partial.sum(1)


def latent_distance_backward(
    grad: torch.Tensor, codes: torch.Tensor, query: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor]:
    """The unit vectors from query to codes, weighted by grad / M; zero where they coincide."""
    experts, samples, latent = codes.shape
    block_m, block_l = _tile(samples, latent)
    by_codes, by_query = (x.new_empty(x.shape) if need else None for x, need in zip((codes, query), needs, strict=True))
    launch(
        _directions,
        (ceil_div(samples, block_m),),
        *(grad, codes, query, by_codes, by_query, experts, samples, latent, grad.stride(0)),
        *codes.stride(),
        *query.stride(),
        BY_CODES=needs[0],
        BY_QUERY=needs[1],
        BLOCK_M=block_m,
        BLOCK_L=block_l,
        threads=128,
    )
    return [x for x in (by_codes, by_query) if x is not None]


def _tile(samples: int, latent: int) -> tuple[int, int]:
    """-> samples and latent dimensions of a tile."""
    block_l = power_of_two(latent)
    return min(power_of_two(samples), max(1, BLOCK // block_l)), block_l
