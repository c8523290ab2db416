"""elbo_loss: the VAE loss of SPEC.md for every image and expert, by which images are routed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import _vae
from ._check import Shapes, at_least_float32
from ._register import below_autograd, cast_halves_to_float32, define, once_differentiable, place
from .backends.registry import forced_here, inherited, run

_TENSORS = "Tensor images, Tensor[] encoder, Tensor[] decoder, float beta{}, Tensor? noise{}"


def elbo_loss(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float = 0.5,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum_pixels (x' - x)^2 + beta * KL(q || N(0, I)) of every image under each of K MLP VAEs ([P], clamp [D]).

    Args:
        images: `[B,F]`, flattened C,H,W; B may be 0.
        encoder: as in `expansion_distances`.
        decoder: [w1 `[K,L,g1]`, b1 `[K,g1]`, w2 `[K,g1,g2]`, b2, w3 `[K,g2,F]`, b3]: tanh, ReLU, linear.
        beta: weight of the KL term, finite.
        noise: `[S,L]`, the same for every image and expert: the reconstruction error is the mean over the S codes
            mu + sigma * noise[s]. None: the mean code.

    Returns:
        `[B,K]` in float32 at least.

    Raises:
        ValueError: a shape, device or beta; TypeError: a dtype (all tensors share one).

    Differentiable once, in every tensor. Runs in float32 under autocast.
    """
    return _forward(images, encoder, decoder, beta, noise)


def elbo_loss_reference(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float = 0.5,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """The VAE loss in plain torch; same arguments and result as `elbo_loss`."""
    dtype = at_least_float32(images.dtype)
    mu, logsigma = _vae.encode(images, encoder)
    codes = mu[None] if noise is None else mu + logsigma.exp() * noise[:, None, None]  # [S,K,B,L]
    error = torch.stack([_vae.decode(code, decoder) for code in codes]).to(dtype) - images.to(dtype)
    mu, logsigma = mu.to(dtype), logsigma.to(dtype)
    kl = 0.5 * (mu.square() + (2 * logsigma).exp() - 1 - 2 * logsigma).sum(-1)
    return (error.square().sum(-1).mean(0) + beta * kl).t().contiguous()


def _check(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float,
    noise: torch.Tensor | None,
) -> None:
    shapes = Shapes("elbo_loss")
    shapes.match("images", images, "B F")
    _vae.check_encoder(shapes, encoder)
    _vae.check_decoder(shapes, decoder)
    if noise is not None:
        shapes.match("noise", noise, "S L")
    if not math.isfinite(beta):
        raise ValueError(f"elbo_loss: beta must be finite, got {beta}")


def _with_defaults(args: tuple) -> tuple:
    """The dispatcher drops trailing arguments that equal the schema's defaults."""
    return args + (0.5, None)[len(args) - 3 :]


def _kernel(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    _check(*args)
    return run("elbo_loss", *args) if len(args[0]) else _fake(*args)


def _fake(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    _check(*args)
    images, encoder = args[:2]
    return images.new_empty(images.shape[0], encoder[0].shape[0], dtype=at_least_float32(images.dtype))


def flat(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], decoder: Sequence[torch.Tensor], noise: torch.Tensor | None
) -> list:
    """The order in which `needs` and the gradients name the tensors: images, encoder, decoder, noise."""
    return [images, *encoder, *decoder, noise]


def _backward_kernel(grad: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    if not len(args[0]):
        return [x.zero_() for x in _backward_fake(grad, *args)]
    return run("elbo_loss_backward", grad, *args)


def _backward_fake(grad: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    images, encoder, decoder, _beta, noise, needs = args
    tensors = flat(images, encoder, decoder, noise)
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need]


class _ElboLoss(torch.autograd.Function):
    """Autograd sees through no list, so encoder and decoder arrive tensor by tensor, beta first."""

    @staticmethod
    def forward(ctx: Any, beta: float, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        ctx.backend, ctx.beta = forced_here(), beta
        ctx.save_for_backward(images, *rest)
        encoder, decoder, noise = _split(rest)
        with below_autograd():
            return _forward(images, encoder, decoder, beta, noise)

    @staticmethod
    @once_differentiable("elbo_loss")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        images, *rest = ctx.saved_tensors
        encoder, decoder, noise = _split(rest)
        needs = ctx.needs_input_grad[1:]
        with inherited(ctx.backend):
            grads = _backward(grad, images, encoder, decoder, ctx.beta, noise, needs)
        return (None, *place(needs, grads))


def _split(rest: Sequence) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    width = len(_vae.ENCODER)
    return list(rest[:width]), list(rest[width:-1]), rest[-1]


def _autograd(*args: Any) -> torch.Tensor:
    images, encoder, decoder, beta, noise = args = _with_defaults(args)
    tensors = flat(images, encoder, decoder, noise)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        _check(*args)  # a list of another length would be split wrongly
        return _ElboLoss.apply(beta, *tensors)
    with below_autograd():
        return _forward(*args)


_forward = define(
    "elbo_loss",
    f"({_TENSORS.format('=0.5', '=None')}) -> Tensor",
    _kernel,
    _fake,
    _autograd,
    cast_halves_to_float32,
)
_backward = define(
    "elbo_loss_backward",
    f"(Tensor grad, {_TENSORS.format('', '')}, bool[] needs) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
