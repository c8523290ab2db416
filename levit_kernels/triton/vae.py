"""The encoders and decoders of K MLP VAEs, layer by layer over all experts at once, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._vae import LOGSIGMA_MAX, LOGSIGMA_MIN
from .matmul import RELU, RELU_BACKWARD, TANH, TANH_BACKWARD, matmul

LEAST, MOST = tl.constexpr(LOGSIGMA_MIN), tl.constexpr(LOGSIGMA_MAX)
Tensors = Sequence[torch.Tensor]


class Encoded(NamedTuple):
    """Activations of the encoders; `raw` is log sigma before the clamp, None where only the mean is asked for."""

    hidden1: torch.Tensor  # [K,M,h1]
    hidden2: torch.Tensor  # [K,M,h2]
    mu: torch.Tensor  # [K,M,L], float32
    raw: torch.Tensor | None


@triton.jit
def clamp_logsigma(raw):
    """Like torch.clamp: NaN stays NaN."""
    raw = tl.where(raw < LEAST, LEAST, raw)
    return tl.where(raw > MOST, MOST, raw)


def hidden(images: torch.Tensor, encoder: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """images `[M,F]` -> the two hidden layers `[K,M,h1]`, `[K,M,h2]`."""
    w1, b1, w2, b2 = encoder[:4]
    hidden1 = matmul(images[None], w1, b1, TANH)
    return hidden1, matmul(hidden1, w2, b2, TANH)


def encode(images: torch.Tensor, encoder: Tensors, with_sigma: bool) -> Encoded:
    """images `[M,F]` under all encoders, for a backward pass."""
    w_mu, b_mu, w_logsigma, b_logsigma = encoder[4:]
    hidden1, hidden2 = hidden(images, encoder)
    mu = matmul(hidden2, w_mu, b_mu, dtype=torch.float32)
    raw = matmul(hidden2, w_logsigma, b_logsigma, dtype=torch.float32) if with_sigma else None
    return Encoded(hidden1, hidden2, mu, raw)


def decode_hidden(codes: torch.Tensor, decoder: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """codes `[K,R,L]` -> the two hidden layers `[K,R,g1]`, `[K,R,g2]`."""
    w1, b1, w2, b2 = decoder[:4]
    hidden1 = matmul(codes, w1, b1, TANH)
    return hidden1, matmul(hidden1, w2, b2, RELU)


def encode_backward(
    by_mu: torch.Tensor,
    by_raw: torch.Tensor | None,
    images: torch.Tensor,
    acts: Encoded,
    encoder: Tensors,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """-> gradients of images `[M,F]` and of the encoder; `needs` asks for [images, *encoder].

    by_raw None: log sigma was not used, its weights' gradients are zero.
    """
    w1, _, w2, _, w_mu, _, w_logsigma, _ = encoder
    needs_images, *needs = needs
    by_w_mu, by_b_mu = _by_layer(acts.hidden2, by_mu, needs[4:6])
    if by_raw is None:
        by_w_sigma, by_b_sigma = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(encoder[6:], needs[6:], strict=True)
        )
        second = None
    else:
        by_w_sigma, by_b_sigma = _by_layer(acts.hidden2, by_raw, needs[6:])
        second = (by_raw, w_logsigma.transpose(1, 2))
    grads = [None, None, None, None, by_w_mu, by_b_mu, by_w_sigma, by_b_sigma]
    if not (needs_images or any(needs[:4])):
        return None, grads
    by_hidden2 = matmul(by_mu, w_mu.transpose(1, 2), None, TANH_BACKWARD, acts.hidden2, second)
    grads[2:4] = _by_layer(acts.hidden1, by_hidden2, needs[2:4])
    if not (needs_images or any(needs[:2])):
        return None, grads
    by_hidden1 = matmul(by_hidden2, w2.transpose(1, 2), None, TANH_BACKWARD, acts.hidden1)
    grads[0:2] = _by_layer(images[None], by_hidden1, needs[0:2])
    by_images = matmul(by_hidden1, w1.transpose(1, 2), summed=True, dtype=torch.float32)[0] if needs_images else None
    return by_images, grads


def decode_backward(
    by_output: torch.Tensor,
    codes: torch.Tensor,
    hiddens: tuple[torch.Tensor, torch.Tensor],
    decoder: Tensors,
    needs_codes: bool,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """-> gradients of codes `[K,R,L]` in float32 and of the decoder, those asked for."""
    w1, _, w2, _, w3, _ = decoder
    hidden1, hidden2 = hiddens
    grads = [None, None, None, None, *_by_layer(hidden2, by_output, needs[4:])]
    if not (needs_codes or any(needs[:4])):
        return None, grads
    by_hidden2 = matmul(by_output, w3.transpose(1, 2), None, RELU_BACKWARD, hidden2)
    grads[2:4] = _by_layer(hidden1, by_hidden2, needs[2:4])
    if not (needs_codes or any(needs[:2])):
        return None, grads
    by_hidden1 = matmul(by_hidden2, w2.transpose(1, 2), None, TANH_BACKWARD, hidden1)
    grads[0:2] = _by_layer(codes, by_hidden1, needs[0:2])
    return matmul(by_hidden1, w1.transpose(1, 2), dtype=torch.float32) if needs_codes else None, grads


def _by_layer(x: torch.Tensor, grad: torch.Tensor, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of a layer's weight and bias from its input `[K or 1,M,I]` and its output's gradient `[K,M,O]`."""
    return [matmul(x.transpose(1, 2), grad) if needs[0] else None, grad.sum(1) if needs[1] else None]
