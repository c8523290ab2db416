"""The training loss of one MLP VAE, computed together with its gradients where a backend can."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import _vae
from ._check import Shapes
from .backends.registry import find_kernel, run

WEIGHTS = {
    "w1": "h1 F",
    "b1": "h1",
    "w2": "h2 h1",
    "b2": "h2",
    "w_mu": "L h2",
    "b_mu": "L",
    "w_logsigma": "L h2",
    "b_logsigma": "L",
    "w3": "g1 L",
    "b3": "g1",
    "w4": "g2 g1",
    "b4": "g2",
    "w5": "F g2",
    "b5": "F",
}


def vae_training_loss(
    images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """Mean over images of sum_pixels (x' - x)^2 + beta * KL(q || N(0, I)) at codes mu + sigma * noise ([P], clamp [D]).

    Args:
        images: `[B,F]`, flattened C,H,W; B >= 1. They get no gradient.
        weights: encoder [w1 `[h1,F]`, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma], then decoder [w3 `[g1,L]`, b3,
            w4, b4, w5 `[F,g2]`, b5], matrices as nn.Linear keeps them; tanh, tanh, linear; tanh, ReLU, linear.
        beta: weight of the KL term, finite.
        noise: `[B,L]`.
        bf16: where the tensors are float32, the factors of matrix products may be rounded to bfloat16; sums and results
            stay float32. A backend that has no such products ignores it.

    Returns:
        A scalar, differentiable once in the weights.

    Raises:
        ValueError: a shape, device or beta; TypeError: a dtype (all tensors share one).
    """
    _check("vae_training_loss", images, weights, beta, noise)
    return run("vae_training_loss", images.detach(), weights, beta, noise.detach(), bf16)


def vae_training_gradients(
    images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor, bf16: bool = False
) -> list[torch.Tensor] | None:
    """The value of `vae_training_loss`, a scalar, and its gradient in each of the weights; no graph is kept of them.
    None where no kernel computes that. Arguments and errors are the same.
    """
    _check("vae_training_gradients", images, weights, beta, noise)
    args = (images, weights, beta, noise, bf16)
    kernel = find_kernel("vae_training_gradients", *args)
    with torch.no_grad():
        return kernel and kernel(*args)


def _check(op: str, images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor) -> None:
    shapes = Shapes(op, may_be_empty="")
    shapes.match("images", images, "B F")
    shapes.match_list("weights", weights, WEIGHTS)
    shapes.match("noise", noise, "B L")
    if not math.isfinite(beta):
        raise ValueError(f"{op}: beta must be finite, got {beta}")


def vae_training_loss_reference(
    images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """The same in plain torch."""
    stacked = [w.t()[None] if w.dim() == 2 else w[None] for w in weights]
    mu, logsigma = (x[0] for x in _vae.encode(images, stacked[:8]))
    decoded = _vae.decode((mu + logsigma.exp() * noise)[None], stacked[8:])[0]
    kl = 0.5 * (mu.square() + (2 * logsigma).exp() - 1 - 2 * logsigma).sum(-1)
    return ((decoded - images).square().sum(-1) + beta * kl).mean()
