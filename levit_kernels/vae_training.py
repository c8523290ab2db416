"""The training loss of one MLP VAE: one node of the autograd graph instead of seventy, its backward pass by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _vae
from ._register import once_differentiable


def vae_training_loss(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Mean over the images of sum over pixels of (x^ - x)^2 + beta KL, at one sampled code per image ([P], VAE loss).

    Args:
        images: `[B,F]`.
        encoder: [w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma], each w in nn.Linear's layout `[out,in]`.
        decoder: [w1, b1, w2, b2, w3, b3], likewise.
        beta: weight of the KL divergence.
        noise: `[B,L]`, the code is mu + sigma noise.

    Returns:
        a scalar, differentiable once in every weight and bias; images and noise get no gradient.
    """
    return _VAETrainingLoss.apply(images.detach(), noise.detach(), beta, *encoder, *decoder)


def vae_training_loss_reference(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float,
    noise: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch."""
    encoder, decoder = ([(x.t() if x.ndim == 2 else x)[None] for x in part] for part in (encoder, decoder))
    mu, logsigma = _vae.encode(images, encoder)
    output = _vae.decode(mu + logsigma.exp() * noise, decoder)
    kl = 0.5 * (mu.square() + (2 * logsigma).exp() - 1 - 2 * logsigma).sum(-1)
    return ((output - images).square().sum(-1) + beta * kl).mean()


class _VAETrainingLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: torch.Tensor, noise: torch.Tensor, beta: float, *weights: torch.Tensor
    ) -> torch.Tensor:
        w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma, v1, c1, v2, c2, v3, c3 = weights
        hidden1 = torch.addmm(b1, images, w1.t()).tanh_()
        hidden2 = torch.addmm(b2, hidden1, w2.t()).tanh_()
        mu = torch.addmm(b_mu, hidden2, w_mu.t())
        raw = torch.addmm(b_logsigma, hidden2, w_logsigma.t())
        logsigma = raw.clamp(_vae.LOGSIGMA_MIN, _vae.LOGSIGMA_MAX)
        sigma = logsigma.exp()
        codes = torch.addcmul(mu, sigma, noise)
        up1 = torch.addmm(c1, codes, v1.t()).tanh_()
        up2 = torch.addmm(c2, up1, v2.t()).relu_()
        error = torch.addmm(c3, up2, v3.t()).sub_(images)
        ctx.beta = beta
        matrices = (w2, w_mu, w_logsigma, v1, v2, v3)
        ctx.save_for_backward(images, noise, hidden1, hidden2, mu, raw, sigma, codes, up1, up2, error, *matrices)
        divergence = torch.addcmul(mu.square(), sigma, sigma).sub_(logsigma, alpha=2).sum() - mu.numel()
        return (error.square().sum() + (beta / 2) * divergence) / len(images)

    @staticmethod
    @once_differentiable("vae_training_loss")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        images, noise, hidden1, hidden2, mu, raw, sigma, codes, up1, up2, error, *matrices = ctx.saved_tensors
        w2, w_mu, w_logsigma, v1, v2, v3 = matrices
        share = grad / len(images)
        by_kl = share * ctx.beta
        by_output = error * (2 * share)
        by_up2 = torch.ops.aten.threshold_backward(by_output @ v3, up2, 0)
        by_up1 = torch.ops.aten.tanh_backward(by_up2 @ v2, up1)
        by_codes = by_up1 @ v1
        by_mu = torch.addcmul(by_codes, mu, by_kl)
        by_logsigma = (by_codes * noise).addcmul_(sigma, by_kl).mul_(sigma).sub_(by_kl)
        by_raw = by_logsigma.masked_fill_((raw < _vae.LOGSIGMA_MIN) | (raw > _vae.LOGSIGMA_MAX), 0)
        by_hidden2 = torch.ops.aten.tanh_backward(torch.addmm(by_mu @ w_mu, by_raw, w_logsigma), hidden2)
        by_hidden1 = torch.ops.aten.tanh_backward(by_hidden2 @ w2, hidden1)
        layers = (
            (by_hidden1, images),
            (by_hidden2, hidden1),
            (by_mu, hidden2),
            (by_raw, hidden2),
            (by_up1, codes),
            (by_up2, up1),
            (by_output, up2),
        )
        grads = [part for by, x in layers for part in (by.t() @ x, by.sum(0))]
        return (None, None, None, *grads)
