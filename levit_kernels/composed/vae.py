"""The layers of the stacked MLP VAEs, forward and backward, for a tile of experts x images.

Few images: several experts per tile through batched products (their weights are then read once, at memory speed). Many:
one expert per tile, its products through oneDNN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .._check import at_least_float32
from .._vae import LOGSIGMA_MAX, LOGSIGMA_MIN
from .linear import matmul

TILE_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}
MIN_BATCHED_EXPERTS = 3

Tensors = Sequence[torch.Tensor]
Totals = Sequence[torch.Tensor | None]


class Encoded(NamedTuple):
    """Activations of the encoders; `raw` is log sigma before the clamp, None where only the mean is asked for."""

    hidden1: torch.Tensor  # [n,b,h1]
    hidden2: torch.Tensor  # [n,b,h2]
    mu: torch.Tensor  # [n,b,L]
    raw: torch.Tensor | None

    def logsigma(self) -> torch.Tensor:
        return self.raw.clamp(LOGSIGMA_MIN, LOGSIGMA_MAX)


class Decoded(NamedTuple):
    """Activations of the decoders."""

    hidden1: torch.Tensor  # [n,r,g1]
    hidden2: torch.Tensor  # [n,r,g2]
    output: torch.Tensor  # [n,r,F]


def encode(images: torch.Tensor, encoder: Tensors, tile: slice, with_sigma: bool) -> Encoded:
    """images `[b,F]` under the tile's encoders."""
    w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma = (x[tile] for x in encoder)
    hidden1 = dense(images, w1, b1).tanh_()
    hidden2 = dense(hidden1, w2, b2).tanh_()
    raw = dense(hidden2, w_logsigma, b_logsigma) if with_sigma else None
    return Encoded(hidden1, hidden2, dense(hidden2, w_mu, b_mu), raw)


def decode(codes: torch.Tensor, decoder: Tensors, tile: slice) -> Decoded:
    """codes `[n,r,L]` under the tile's decoders."""
    w1, b1, w2, b2, w3, b3 = (x[tile] for x in decoder)
    hidden1 = dense(codes, w1, b1).tanh_()
    hidden2 = dense(hidden1, w2, b2).relu_()
    return Decoded(hidden1, hidden2, dense(hidden2, w3, b3))


def encode_backward(
    by_mu: torch.Tensor,
    by_logsigma: torch.Tensor | None,
    images: torch.Tensor,
    acts: Encoded,
    encoder: Tensors,
    totals: Totals,
    tile: slice,
    needs_images: bool,
) -> torch.Tensor | None:
    """Adds the encoders' gradients to `totals` (None: not asked for); returns the images' `[b,F]` if asked for."""
    w1, _, w2, _, w_mu, _, w_logsigma, _ = (x[tile] for x in encoder)
    t = [None if x is None else x[tile] for x in totals]
    deeper = needs_images or any(x is not None for x in t[:4])
    by_hidden = dense_backward(by_mu, acts.hidden2, w_mu, t[4], t[5], deeper)
    if by_logsigma is not None:
        by_raw = by_logsigma.masked_fill((acts.raw < LOGSIGMA_MIN) | (acts.raw > LOGSIGMA_MAX), 0)
        by_sigma_hidden = dense_backward(by_raw, acts.hidden2, w_logsigma, t[6], t[7], deeper)
        by_hidden = by_hidden.add_(by_sigma_hidden) if deeper else None
    if not deeper:
        return None
    deeper = needs_images or any(x is not None for x in t[:2])
    by_hidden = tanh_backward(by_hidden, acts.hidden2)
    by_hidden = dense_backward(by_hidden, acts.hidden1, w2, t[2], t[3], deeper)
    if not deeper:
        return None
    by_hidden = tanh_backward(by_hidden, acts.hidden1)
    by_images = dense_backward(by_hidden, images, w1, t[0], t[1], needs_images)
    return by_images.sum(0, dtype=at_least_float32(images.dtype)) if needs_images else None


def decode_backward(
    by_output: torch.Tensor,
    codes: torch.Tensor,
    acts: Decoded,
    decoder: Tensors,
    totals: Totals,
    tile: slice,
    needs_codes: bool,
) -> torch.Tensor | None:
    """Adds the decoders' gradients to `totals` (None: not asked for); returns the codes' `[n,r,L]` if asked for."""
    w1, _, w2, _, w3, _ = (x[tile] for x in decoder)
    t = [None if x is None else x[tile] for x in totals]
    deeper = needs_codes or any(x is not None for x in t[:4])
    by_hidden = dense_backward(by_output, acts.hidden2, w3, t[4], t[5], deeper)
    if not deeper:
        return None
    deeper = needs_codes or any(x is not None for x in t[:2])
    by_hidden = torch.ops.aten.threshold_backward(by_hidden, acts.hidden2, 0)
    by_hidden = dense_backward(by_hidden, acts.hidden1, w2, t[2], t[3], deeper)
    if not deeper:
        return None
    by_hidden = tanh_backward(by_hidden, acts.hidden1)
    return dense_backward(by_hidden, codes, w1, t[0], t[1], needs_codes)


def tanh_backward(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.tanh_backward(grad, output)


def dense(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """x `[b,I]`, shared, or `[n,b,I]`; w `[n,I,O]`, b `[n,O]` -> `[n,b,O]`."""
    if len(w) == 1:
        return matmul(x.reshape(-1, x.shape[-1]), w[0], b[0])[None]
    return torch.baddbmm(b[:, None], x.expand(len(w), -1, -1), w)


def dense_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    total_w: torch.Tensor | None,
    total_b: torch.Tensor | None,
    needs_x: bool,
) -> torch.Tensor | None:
    """Backward of `dense`; adds to the totals, returns the gradient of x per expert `[n,b,I]`."""
    if total_w is not None:
        if len(w) == 1:
            total_w[0] += matmul(x.reshape(-1, x.shape[-1]).t(), grad[0])
        else:
            total_w += torch.bmm(x.expand(len(w), -1, -1).transpose(1, 2), grad)
    if total_b is not None:
        total_b += grad.sum(1, dtype=total_b.dtype)
    if not needs_x:
        return None
    return matmul(grad[0], w[0].t())[None] if len(w) == 1 else torch.bmm(grad, w.transpose(1, 2))


def new_totals(tensors: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Zeros in float32 at least for the tensors whose gradients are asked for."""
    return [
        x.new_zeros(x.shape, dtype=at_least_float32(x.dtype)) if need else None
        for x, need in zip(tensors, needs, strict=True)
    ]


def tiles(experts: int, images: int, numbers: int, dtype: torch.dtype, device: str) -> Iterator[tuple[slice, slice]]:
    """Cuts experts x images so that a tile's temporaries, `numbers` per expert and image, stay within TILE_BYTES."""
    image_bytes = numbers * dtype.itemsize
    fit = TILE_BYTES[device] // (image_bytes * images)
    if min(fit, experts) >= MIN_BATCHED_EXPERTS:
        for k in range(0, experts, fit):
            yield slice(k, min(k + fit, experts)), slice(0, images)
        return
    most = max(1, TILE_BYTES[device] // image_bytes)
    step = -(-images // -(-images // most))  # equal parts, none above `most`
    for k in range(experts):
        for start in range(0, images, step):
            yield slice(k, k + 1), slice(start, min(start + step, images))
