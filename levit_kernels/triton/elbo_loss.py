"""elbo_loss: the VAEs layer by layer, all experts at once; the last is summed on chip, no reconstruction exists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import matmul as matmuls
from .launch import ceil_div, dot_precision, launch, near, power_of_two
from .matmul import product
from .vae import LEAST, MOST, clamp_logsigma, decode_backward, decode_hidden, encode, encode_backward

Tensors = Sequence[torch.Tensor]
MOST_LATENT = 1024
SCRATCH_BYTES = 256 << 20  # of activations at a time


@triton.jit
def _sample(
    mu,
    raw,
    noise,
    codes,
    kl,
    images,
    samples,
    latent,
    stride_ns,
    stride_nl,
    NOISY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """mu, raw [K,B,L] -> codes [K,S,B,L] and kl [K,B]; one program: BLOCK_M images of one expert."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_L)
    inside = (m < images)[:, None] & (c < latent)[None, :]
    dense = m.to(tl.int64)[:, None] * latent + c[None, :]
    mean = tl.load(mu + k * images * latent + dense, mask=inside, other=0)
    logsigma = clamp_logsigma(tl.load(raw + k * images * latent + dense, mask=inside, other=0))
    sigma = tl.exp(logsigma)
    divergence = tl.sum(mean * mean + (sigma * sigma - 1) - 2 * logsigma, 1) / 2
    tl.store(kl + k * images + m, divergence, mask=m < images)
    for i in range(0, samples):
        code = mean
        if NOISY:
            epsilon = tl.load(noise + i * stride_ns + c * stride_nl, mask=c < latent, other=0).to(tl.float32)
            code += sigma * epsilon[None, :]
        where = codes + (k * samples + i) * images * latent + dense
        tl.store(where, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _reconstruct(
    x,
    w,
    b,
    images,
    grad,
    out,
    rows,
    batch,
    pixels,
    depth,
    samples,
    stride_xk,
    stride_wk,
    stride_bk,
    stride_bf,
    stride_im,
    stride_if,
    stride_db,
    stride_dk,
    SA_M: tl.constexpr,
    SA_D: tl.constexpr,
    SB_D: tl.constexpr,
    SB_N: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The last layer of the decoders from the second hidden one x [K,S*B,D], and its error against the images [B,F].

    Forward: out [K,blocks,S*B], squared errors summed over BLOCK_N pixels. Backward: out [K,S*B,F], their gradient.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2).to(tl.int64)
    inside = (m < rows)[:, None] & (n < pixels)[None, :]
    x += k * stride_xk
    w += k * stride_wk
    error = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    error = product(error, x, w, m, n, rows, pixels, depth, SA_M, SA_D, SB_D, SB_N, BLOCK_D, PRECISION)
    error += tl.load(b + k * stride_bk + n * stride_bf, mask=n < pixels, other=0).to(tl.float32)[None, :]
    image = (m % batch).to(tl.int64)
    target = images + image[:, None] * stride_im + n.to(tl.int64)[None, :] * stride_if
    error -= tl.load(target, mask=inside, other=0).to(tl.float32)
    if BACKWARD:
        weight = tl.load(grad + image * stride_db + k * stride_dk, mask=m < rows, other=0).to(tl.float32) * (
            2 / samples
        )
        where = out + (k * rows + m.to(tl.int64))[:, None] * pixels + n[None, :]
        tl.store(where, (error * weight[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        error = tl.where(inside, error, 0)
        where = out + (k * tl.num_programs(1) + tl.program_id(1)) * rows + m
        tl.store(where, tl.sum(error * error, 1), mask=m < rows)


@triton.jit
def _by_codes(
    grad,
    by_codes,
    mu,
    raw,
    noise,
    by_mu,
    by_raw,
    by_noise,
    images,
    samples,
    latent,
    beta,
    stride_db,
    stride_dk,
    stride_ns,
    stride_nl,
    NOISY: tl.constexpr,
    BY_NOISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """by_codes [K,S,B,L] -> by_mu, by_raw [K,B,L] and by_noise [K,blocks,S,L], still to be summed."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_L)
    inside = (m < images)[:, None] & (c < latent)[None, :]
    dense = m.to(tl.int64)[:, None] * latent + c[None, :]
    here = k * images * latent + dense
    logsigma = tl.load(raw + here, mask=inside, other=0)
    within = (logsigma >= LEAST) & (logsigma <= MOST)
    sigma = tl.exp(clamp_logsigma(logsigma))
    upstream = grad + m.to(tl.int64) * stride_db + k * stride_dk
    weight = beta * tl.load(upstream, mask=m < images, other=0).to(tl.float32)[:, None]
    total = weight * tl.load(mu + here, mask=inside, other=0)
    by_sigma = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    for i in range(0, samples):
        by_code = tl.load(by_codes + (k * samples + i) * images * latent + dense, mask=inside, other=0)
        total += by_code
        if NOISY:
            epsilon = tl.load(noise + i * stride_ns + c * stride_nl, mask=c < latent, other=0).to(tl.float32)
            by_sigma += by_code * epsilon[None, :]
            if BY_NOISE:
                where = by_noise + ((k * tl.num_programs(0) + tl.program_id(0)) * samples + i) * latent + c
                tl.store(where, tl.sum(tl.where(inside, by_code * sigma, 0), 0), mask=c < latent)
    by_logsigma = weight * (sigma * sigma - 1) + sigma * by_sigma
    tl.store(by_mu + here, total.to(by_mu.dtype.element_ty), mask=inside)
    tl.store(by_raw + here, tl.where(within, by_logsigma, 0).to(by_raw.dtype.element_ty), mask=inside)


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    images, encoder, decoder, _, noise = args[op.endswith("_backward") :][:5]
    latent, samples = encoder[4].shape[2], 1 if noise is None else len(noise)
    if latent > MOST_LATENT:
        return f"takes at most L = {MOST_LATENT}, got {latent}"
    widest = max(x.shape[2] for x in (*encoder, *decoder) if x.ndim == 3)
    return matmuls.too_many(samples * len(images), max(widest, images.shape[1]), "a layer of all codes")


def elbo_loss(
    images: torch.Tensor, encoder: Tensors, decoder: Tensors, beta: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """See levit_kernels.elbo_loss."""
    experts, samples = len(encoder[0]), 1 if noise is None else len(noise)
    numbers = encoder[0].shape[2] + encoder[2].shape[2] + samples * (decoder[0].shape[2] + decoder[2].shape[2])
    step = max(1, SCRATCH_BYTES // (len(images) * numbers * images.element_size()))
    parts = [
        _losses(images, [x[k : k + step] for x in encoder], [x[k : k + step] for x in decoder], beta, noise)
        for k in range(0, experts, step)
    ]
    return torch.cat(parts).t().contiguous()


def _losses(
    images: torch.Tensor, encoder: Tensors, decoder: Tensors, beta: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """-> `[K,B]`."""
    acts = encode(images, encoder, True)
    codes, kl = _codes(acts.mu, acts.raw, noise, images.dtype)
    _, x = decode_hidden(codes.flatten(1, 2), decoder)
    errors = _last_layer(x, images, decoder, None)
    return errors.sum(1).view(*codes.shape[:3]).mean(1).add_(kl, alpha=beta)


def _codes(
    mu: torch.Tensor, raw: torch.Tensor, noise: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> codes `[K,S,B,L]`, divergence `[K,B]`."""
    experts, images, latent = mu.shape
    samples = 1 if noise is None else len(noise)
    codes = mu.new_empty(experts, samples, images, latent, dtype=dtype)
    kl = mu.new_empty(experts, images)
    tile = _tile(latent)
    launch(
        _sample,
        (ceil_div(images, tile["BLOCK_M"]), experts),
        *(mu, raw, noise, codes, kl, images, samples, latent, *((0, 0) if noise is None else noise.stride())),
        NOISY=noise is not None,
        **tile,
    )
    return codes, kl


def _last_layer(x: torch.Tensor, images: torch.Tensor, decoder: Tensors, grad: torch.Tensor | None) -> torch.Tensor:
    """Squared errors `[K,blocks,S*B]`, or with the losses' gradient `[B,K]` the reconstruction's `[K,S*B,F]`."""
    w, b = near(decoder[4]), decoder[5]
    experts, rows, depth = x.shape
    batch, pixels = images.shape
    tile = matmuls.tile(depth, x.dtype)
    blocks = ceil_div(pixels, tile["BLOCK_N"])
    if grad is None:
        out = x.new_empty(experts, blocks, rows, dtype=torch.float32)
    else:
        out = x.new_empty(experts, rows, pixels)
    launch(
        _reconstruct,
        (ceil_div(rows, tile["BLOCK_M"]), blocks, experts),
        *(x, w, b, images, grad, out, rows, batch, pixels, depth, rows // batch),
        *(x.stride(0), w.stride(0), *b.stride(), *images.stride(), *((0, 0) if grad is None else grad.stride())),
        **matmuls.strides(x, w),
        BACKWARD=grad is not None,
        PRECISION=dot_precision(x.dtype),
        **tile,
    )
    return out


def elbo_loss_backward(
    grad: torch.Tensor,
    images: torch.Tensor,
    encoder: Tensors,
    decoder: Tensors,
    beta: float,
    noise: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of images, encoder, decoder and noise, those that `needs` names; activations are recomputed."""
    needs_images, needs_noise = needs[0], needs[-1]
    needs_encoder, needs_decoder = needs[: 1 + len(encoder)], needs[1 + len(encoder) : -1]
    acts = encode(images, encoder, True)
    codes, _ = _codes(acts.mu, acts.raw, noise, images.dtype)
    rows = codes.flatten(1, 2)
    hiddens = decode_hidden(rows, decoder)
    by_output = _last_layer(hiddens[1], images, decoder, grad)
    deeper = any(needs_encoder) or needs_noise
    by_codes, by_decoder = decode_backward(by_output, rows, hiddens, decoder, deeper, needs_decoder)
    by_images = by_noise = None
    by_encoder: list[torch.Tensor | None] = []
    if deeper:
        by_mu, by_raw, by_noise = _by_encoder_outputs(grad, by_codes, acts.mu, acts.raw, beta, noise, needs_noise)
        by_mu, by_raw = by_mu.to(images.dtype), by_raw.to(images.dtype)
        by_images, by_encoder = encode_backward(by_mu, by_raw, images, acts, encoder, needs_encoder)
    if needs_images:
        errors = by_output.view(len(by_output), -1, *images.shape).sum((0, 1), dtype=torch.float32)
        by_images = (by_images - errors).to(images.dtype)
    return [x for x in (by_images, *by_encoder, *by_decoder, by_noise) if x is not None]


def _by_encoder_outputs(
    grad: torch.Tensor,
    by_codes: torch.Tensor,
    mu: torch.Tensor,
    raw: torch.Tensor,
    beta: float,
    noise: torch.Tensor | None,
    needs_noise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """-> gradients of mu and raw `[K,B,L]`, and of the noise `[S,L]` if asked for."""
    experts, images, latent = mu.shape
    samples = 1 if noise is None else len(noise)
    by_mu, by_raw = torch.empty_like(mu), torch.empty_like(raw)
    tile = _tile(latent)
    blocks = ceil_div(images, tile["BLOCK_M"])
    by_noise = mu.new_empty(experts, blocks, samples, latent) if needs_noise else None
    launch(
        _by_codes,
        (blocks, experts),
        *(grad, by_codes, mu, raw, noise, by_mu, by_raw, by_noise, images, samples, latent, beta, *grad.stride()),
        *((0, 0) if noise is None else noise.stride()),
        NOISY=noise is not None,
        BY_NOISE=needs_noise,
        **tile,
    )
    return by_mu, by_raw, by_noise.sum((0, 1)).to(noise.dtype) if needs_noise else None


def _tile(latent: int) -> dict[str, int]:
    block_l = power_of_two(latent)
    return {"BLOCK_M": max(1, 1024 // block_l), "BLOCK_L": block_l, "threads": 128}
