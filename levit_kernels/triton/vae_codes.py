"""vae_codes: two hidden layers of all experts, then mean, deviation and sample in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import matmul as matmuls
from .latent_distance import load_rows
from .launch import ceil_div, dot_precision, launch, near
from .matmul import product
from .vae import clamp_logsigma, hidden


@triton.jit
def _codes(
    x,
    w_mu,
    b_mu,
    w_logsigma,
    b_logsigma,
    noise,
    codes,
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
    stride_nk,
    stride_nm,
    stride_nl,
    SA_M: tl.constexpr,
    SA_D: tl.constexpr,
    SB_D: tl.constexpr,
    SB_N: tl.constexpr,
    SB2_D: tl.constexpr,
    SB2_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """codes [K,M,L] of the second hidden layer x [K,M,D]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2).to(tl.int64)
    x += k * stride_xk
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    w = w_logsigma + k * stride_sk
    raw = product(zeros, x, w, m, c, samples, latent, depth, SA_M, SA_D, SB2_D, SB2_N, BLOCK_D, PRECISION)
    raw += tl.load(b_logsigma + k * stride_bsk + c * stride_bsl, mask=c < latent, other=0).to(tl.float32)[None, :]
    code = tl.exp(clamp_logsigma(raw)) * load_rows(noise + k * stride_nk, m, samples, c, latent, stride_nm, stride_nl)
    w = w_mu + k * stride_mk
    code = product(code, x, w, m, c, samples, latent, depth, SA_M, SA_D, SB_D, SB_N, BLOCK_D, PRECISION)
    code += tl.load(b_mu + k * stride_bmk + c * stride_bml, mask=c < latent, other=0).to(tl.float32)[None, :]
    where = codes + (k * samples + m)[:, None] * latent + c[None, :]
    tl.store(where, code.to(codes.dtype.element_ty), mask=(m < samples)[:, None] & (c < latent)[None, :])


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    images, encoder = args[:2]
    widest = max(images.shape[1], *(x.shape[2] for x in encoder[::2]))
    return matmuls.too_many(max(images.shape), widest, "a layer")


def vae_codes(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """See levit_kernels.vae_codes."""
    w_mu, b_mu, w_logsigma, b_logsigma = encoder[4:]
    w_mu, w_logsigma = near(w_mu), near(w_logsigma)
    _, x = hidden(images, encoder)
    experts, samples, depth = x.shape
    latent = w_mu.shape[2]
    codes = x.new_empty(experts, samples, latent)
    tile = matmuls.tile(depth, x.dtype, 2)
    second = matmuls.strides(x, w_logsigma, "2")
    launch(
        _codes,
        (ceil_div(samples, tile["BLOCK_M"]), ceil_div(latent, tile["BLOCK_N"]), experts),
        *(x, w_mu, b_mu, w_logsigma, b_logsigma, noise, codes, samples, latent, depth, x.stride(0)),
        *(w_mu.stride(0), w_logsigma.stride(0), *b_mu.stride(), *b_logsigma.stride(), *noise.stride()),
        **matmuls.strides(x, w_mu),
        SB2_D=second["SB2_D"],
        SB2_N=second["SB2_N"],
        PRECISION=dot_precision(x.dtype),
        **tile,
    )
    return codes
