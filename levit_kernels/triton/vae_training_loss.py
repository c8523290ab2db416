"""vae_training_loss: one launch per layer and direction; the gradients are made while the activations are at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .._loss import LossWithGradients
from ..vae_training import vae_training_loss_reference
from . import matmul as matmuls
from .launch import ceil_div, dot_precision, launch
from .layer_backward import layer_backward
from .matmul import RELU, RELU_BACKWARD, TANH, TANH_BACKWARD, matmul, product
from .vae import LEAST, MOST, clamp_logsigma


@triton.jit
def _codes(
    x,
    w_mu,
    b_mu,
    w_logsigma,
    b_logsigma,
    noise,
    mu,
    raw,
    codes,
    parts,
    rows,
    beta,
    LATENT: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [rows, DEPTH] -> mu and raw log sigma, codes [rows, LATENT], and each image's share of the divergence."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    mean = product(zeros, x, w_mu, m, c, rows, LATENT, DEPTH, DEPTH, 1, 1, DEPTH, BLOCK_D, PRECISION)
    mean += tl.load(b_mu + c, mask=c < LATENT, other=0).to(tl.float32)[None, :]
    logsigma = product(zeros, x, w_logsigma, m, c, rows, LATENT, DEPTH, DEPTH, 1, 1, DEPTH, BLOCK_D, PRECISION)
    logsigma += tl.load(b_logsigma + c, mask=c < LATENT, other=0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (c < LATENT)[None, :]
    where = m[:, None] * LATENT + c[None, :]
    tl.store(mu + where, mean, mask=inside)
    tl.store(raw + where, logsigma, mask=inside)
    logsigma = clamp_logsigma(logsigma)
    sigma = tl.exp(logsigma)
    code = mean + sigma * tl.load(noise + where, mask=inside, other=0).to(tl.float32)
    tl.store(codes + where, code.to(codes.dtype.element_ty), mask=inside)
    divergence = tl.where(inside, mean * mean + (sigma * sigma - 1) - 2 * logsigma, 0)
    tl.store(parts + tl.program_id(1) * rows + m, tl.sum(divergence, 1) * (0.5 * beta / rows), mask=m < rows)


@triton.jit
def _reconstruct(
    x,
    w,
    b,
    images,
    by_output,
    parts,
    rows,
    PIXELS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The last layer from x [rows, DEPTH]: the gradient of its output [rows, PIXELS], and each image's share of the
    error."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    error = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    error = product(error, x, w, m, n, rows, PIXELS, DEPTH, DEPTH, 1, 1, DEPTH, BLOCK_D, PRECISION)
    error += tl.load(b + n, mask=n < PIXELS, other=0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < PIXELS)[None, :]
    where = m[:, None] * PIXELS + n[None, :]
    error = tl.where(inside, error - tl.load(images + where, mask=inside, other=0).to(tl.float32), 0)
    tl.store(by_output + where, (error * (2.0 / rows)).to(by_output.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(1) * rows + m, tl.sum(error * error, 1) / rows, mask=m < rows)


@triton.jit
def _by_codes(by_codes, mu, raw, noise, by_mu, by_raw, numbers, beta, BLOCK: tl.constexpr):
    """The gradients of mu and of log sigma before its clamp, from that of the codes, all [numbers]; beta per image."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numbers
    by_code = tl.load(by_codes + i, mask=inside, other=0)
    tl.store(
        by_mu + i, (by_code + beta * tl.load(mu + i, mask=inside, other=0)).to(by_mu.dtype.element_ty), mask=inside
    )
    logsigma = tl.load(raw + i, mask=inside, other=0)
    sigma = tl.exp(clamp_logsigma(logsigma))
    by_raw_i = beta * (sigma * sigma - 1) + sigma * by_code * tl.load(noise + i, mask=inside, other=0).to(tl.float32)
    within = (logsigma >= LEAST) & (logsigma <= MOST)
    tl.store(by_raw + i, tl.where(within, by_raw_i, 0).to(by_raw.dtype.element_ty), mask=inside)


def too_large(op: str, args: tuple) -> str | None:
    """Why no tile holds a call, or None."""
    images, weights = args[:2]
    return matmuls.too_many(max(len(images), *map(len, weights)), max(x.shape[-1] for x in weights), "a layer")


def vae_training_loss(
    images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """See levit_kernels.vae_training; without gradients to compute it is left to torch."""
    if not torch.is_grad_enabled():
        return vae_training_loss_reference(images, weights, beta, noise)
    x, epsilon, *dense = (x.detach().contiguous() for x in (images, noise, *weights))
    return LossWithGradients.apply(lambda: _loss_and_gradients(x, dense, beta, epsilon), False, *weights)[0]


def _loss_and_gradients(
    images: torch.Tensor, weights: list[torch.Tensor], beta: float, noise: torch.Tensor
) -> list[torch.Tensor]:
    """-> the loss, then the weights' gradients; all arguments are dense."""
    w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma, w3, b3, w4, b4, w5, b5 = weights
    hidden1 = _layer(images, w1, b1, TANH)
    hidden2 = _layer(hidden1, w2, b2, TANH)
    rows, (latent, depth), pixels = len(images), w_mu.shape, len(w5)
    tile, precision = matmuls.tile(depth, images.dtype, 2), dot_precision(images.dtype)
    of_codes, of_pixels = ceil_div(latent, tile["BLOCK_N"]), ceil_div(pixels, tile["BLOCK_N"])
    parts = images.new_empty(of_codes + of_pixels, rows, dtype=torch.float32)
    mu, raw, by_codes = (images.new_empty(rows, latent, dtype=torch.float32) for _ in range(3))
    codes, by_mu, by_raw = (images.new_empty(rows, latent) for _ in range(3))
    launch(
        _codes,
        (ceil_div(rows, tile["BLOCK_M"]), of_codes),
        *(hidden2, w_mu, b_mu, w_logsigma, b_logsigma, noise, mu, raw, codes, parts, rows, beta),
        LATENT=latent,
        DEPTH=depth,
        PRECISION=precision,
        **tile,
    )
    hidden3 = _layer(codes, w3, b3, TANH)
    hidden4 = _layer(hidden3, w4, b4, RELU)
    by_output = images.new_empty(rows, pixels)
    tile = matmuls.tile(w5.shape[1], images.dtype)
    launch(
        _reconstruct,
        (ceil_div(rows, tile["BLOCK_M"]), of_pixels),
        *(hidden4, w5, b5, images, by_output, parts[of_codes:], rows),
        PIXELS=pixels,
        DEPTH=w5.shape[1],
        PRECISION=precision,
        **tile,
    )
    by_hidden4, by_last = layer_backward(hidden4, [(w5, by_output)], RELU_BACKWARD, images.dtype)
    by_hidden3, by_fourth = layer_backward(hidden3, [(w4, by_hidden4)], TANH_BACKWARD, images.dtype)
    by_codes, by_third = layer_backward(codes, [(w3, by_hidden3)], by_input=torch.float32)
    launch(
        _by_codes,
        (ceil_div(mu.numel(), 1024),),
        *(by_codes, mu, raw, noise, by_mu, by_raw, mu.numel(), beta / rows),
        BLOCK=1024,
        threads=128,
    )
    by_hidden2, by_code_layers = layer_backward(
        hidden2, [(w_mu, by_mu), (w_logsigma, by_raw)], TANH_BACKWARD, images.dtype
    )
    by_hidden1, by_second = layer_backward(hidden1, [(w2, by_hidden2)], TANH_BACKWARD, images.dtype)
    _, by_first = layer_backward(images, [(w1, by_hidden1)])
    loss = parts.sum().to(images.dtype)
    return [loss, *by_first, *by_second, *by_code_layers, *by_third, *by_fourth, *by_last]


def _layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, then: tl.constexpr) -> torch.Tensor:
    return matmul(x[None], w.t()[None], b[None], then)[0]
