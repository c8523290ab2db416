"""expansion_distances: two hidden layers of all experts, then codes and distances in one kernel: no code is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import matmul as matmuls
from .latent_distance import load_rows
from .launch import ceil_div, dot_precision, launch, near, power_of_two
from .matmul import product
from .vae import LEAST, MOST, clamp_logsigma, encode, encode_backward, hidden

MOST_LATENT = 256
SCRATCH_BYTES = 256 << 20  # of hidden layers at a time


@triton.jit
def _distance(
    x,
    w_mu,
    b_mu,
    w_logsigma,
    b_logsigma,
    query,
    noise,
    partial,
    samples,
    latent,
    depth,
    stride_xk,
    stride_mk,
    stride_sk,
    stride_bmk,
    stride_bml,
    stride_bsk,
    stride_bsl,
    stride_qm,
    stride_ql,
    stride_nk,
    stride_nm,
    stride_nl,
    SA_M: tl.constexpr,
    SA_D: tl.constexpr,
    SB_D: tl.constexpr,
    SB_N: tl.constexpr,
    SB2_D: tl.constexpr,
    SB2_N: tl.constexpr,
    NOISY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial [K, blocks]: mean distance of BLOCK_M samples' codes, made of the second hidden layer x [K,M,D]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_L)
    x += k * stride_xk
    n = c
    zeros = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    code = product(
        zeros, x, w_mu + k * stride_mk, m, n, samples, latent, depth, SA_M, SA_D, SB_D, SB_N, BLOCK_D, PRECISION
    )
    code += tl.load(b_mu + k * stride_bmk + n * stride_bml, mask=c < latent, other=0).to(tl.float32)[None, :]
    if NOISY:
        w = w_logsigma + k * stride_sk
        raw = product(zeros, x, w, m, n, samples, latent, depth, SA_M, SA_D, SB2_D, SB2_N, BLOCK_D, PRECISION)
        raw += tl.load(b_logsigma + k * stride_bsk + n * stride_bsl, mask=c < latent, other=0).to(tl.float32)[None, :]
        epsilon = load_rows(noise + k * stride_nk, m, samples, c, latent, stride_nm, stride_nl)
        code += tl.exp(clamp_logsigma(raw)) * epsilon
    difference = code - load_rows(query, m, samples, c, latent, stride_qm, stride_ql)
    difference = tl.where((m < samples)[:, None] & (c < latent)[None, :], difference, 0)
    distance = tl.sqrt_rn(tl.sum(difference * difference, 1))
    tl.store(partial + k * tl.num_programs(0) + tl.program_id(0), tl.sum(distance, 0) / samples)


@triton.jit
def _by_codes(
    grad,
    mu,
    raw,
    query,
    noise,
    by_mu,
    by_raw,
    by_query,
    by_noise,
    experts,
    samples,
    latent,
    stride_d,
    stride_qm,
    stride_ql,
    stride_nk,
    stride_nm,
    stride_nl,
    NOISY: tl.constexpr,
    BY_QUERY: tl.constexpr,
    BY_NOISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One program: BLOCK_M samples of all experts, the query's gradient summed over them."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_L)
    inside = (m < samples)[:, None] & (c < latent)[None, :]
    near = load_rows(query, m, samples, c, latent, stride_qm, stride_ql)
    total = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    for i in range(0, experts):
        k = tl.zeros((), tl.int64) + i
        dense = (k * samples + m)[:, None] * latent + c[None, :]
        difference = tl.load(mu + dense, mask=inside, other=0) - near
        if NOISY:
            epsilon = load_rows(noise + k * stride_nk, m, samples, c, latent, stride_nm, stride_nl)
            logsigma = tl.load(raw + dense, mask=inside, other=0)
            within = (logsigma >= LEAST) & (logsigma <= MOST)
            sigma = tl.exp(clamp_logsigma(logsigma))
            difference += tl.where(inside, sigma * epsilon, 0)
        distance = tl.sqrt_rn(tl.sum(difference * difference, 1))[:, None]
        weight = tl.load(grad + k * stride_d).to(tl.float32) / samples
        direction = weight * (difference / tl.where(distance == 0, 1, distance))
        tl.store(by_mu + dense, direction.to(by_mu.dtype.element_ty), mask=inside)
        if NOISY:
            by_sigma = direction * sigma
            if BY_NOISE:
                tl.store(by_noise + dense, by_sigma.to(by_noise.dtype.element_ty), mask=inside)
            by_logsigma = tl.where(within, by_sigma * epsilon, 0)
            tl.store(by_raw + dense, by_logsigma.to(by_raw.dtype.element_ty), mask=inside)
        total -= direction
    if BY_QUERY:
        where = by_query + m.to(tl.int64)[:, None] * latent + c[None, :]
        tl.store(where, total.to(by_query.dtype.element_ty), mask=inside)


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    images, encoder, query = args[op.endswith("_backward") :][:3]
    latent = query.shape[1]
    if latent > MOST_LATENT:
        return f"takes at most L = {MOST_LATENT}, got {latent}"
    widest = max(x.shape[2] for x in encoder if x.ndim == 3)
    return matmuls.too_many(len(images), max(widest, images.shape[1]), "a layer of all images")


def expansion_distances(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """See levit_kernels.expansion_distances."""
    experts, numbers = len(encoder[0]), encoder[0].shape[2] + encoder[2].shape[2]
    step = max(1, SCRATCH_BYTES // (len(images) * numbers * images.element_size()))
    parts = [
        _distances(images, [x[k : k + step] for x in encoder], query, None if noise is None else noise[k : k + step])
        for k in range(0, experts, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _distances(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    _, x = hidden(images, encoder)
    w_mu, b_mu, w_logsigma, b_logsigma = (near(w) if w.ndim == 3 else w for w in encoder[4:])
    experts, samples, depth = x.shape
    block_m, block_l = 16, power_of_two(query.shape[1], 16)
    partial = x.new_empty(experts, ceil_div(samples, block_m), dtype=torch.float32)
    sigma = matmuls.strides(x, w_logsigma, "2")
    launch(
        _distance,
        (partial.shape[1], experts),
        *(x, w_mu, b_mu, w_logsigma, b_logsigma, query, noise, partial, samples, query.shape[1], depth),
        *(x.stride(0), w_mu.stride(0), w_logsigma.stride(0), *b_mu.stride(), *b_logsigma.stride(), *query.stride()),
        *((0, 0, 0) if noise is None else noise.stride()),
        **matmuls.strides(x, w_mu),
        SB2_D=sigma["SB2_D"],
        SB2_N=sigma["SB2_N"],
        NOISY=noise is not None,
        BLOCK_M=block_m,
        BLOCK_L=block_l,
        BLOCK_D=min(32, power_of_two(depth, 16)),
        PRECISION=dot_precision(x.dtype),
        threads=128 if x.dtype == torch.float32 else 256,  # half as many spill on sm_100
    )
    return partial.sum(1)


def expansion_distances_backward(
    grad: torch.Tensor,
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    query: torch.Tensor,
    noise: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of images, encoder, query and noise, those that `needs` names; activations are recomputed."""
    *needs_encoder, needs_query, needs_noise = needs
    acts = encode(images, encoder, noise is not None)
    experts, samples, latent = acts.mu.shape
    by_mu = images.new_empty(acts.mu.shape)
    by_raw = None if noise is None else images.new_empty(acts.mu.shape)
    by_query = query.new_empty(query.shape) if needs_query else None
    by_noise = noise.new_empty(noise.shape) if needs_noise else None
    block_l = power_of_two(latent)
    block_m = max(1, 1024 // block_l)
    launch(
        _by_codes,
        (ceil_div(samples, block_m),),
        *(grad, acts.mu, acts.raw, query, noise, by_mu, by_raw, by_query, by_noise, experts, samples, latent),
        *(grad.stride(0), *query.stride(), *((0, 0, 0) if noise is None else noise.stride())),
        NOISY=noise is not None,
        BY_QUERY=needs_query,
        BY_NOISE=needs_noise,
        BLOCK_M=block_m,
        BLOCK_L=block_l,
        threads=128,
    )
    grads = []
    if any(needs_encoder):
        by_images, by_encoder = encode_backward(by_mu, by_raw, images, acts, encoder, needs_encoder)
        grads = [by_images.to(images.dtype) if by_images is not None else None, *by_encoder]
    return [x for x in (*grads, by_query, by_noise) if x is not None]
