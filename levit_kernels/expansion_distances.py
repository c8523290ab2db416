"""expansion_distances: equation 6 of SPEC.md from the images on: encoders, sampling and distance in one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _vae
from ._check import Shapes, at_least_float32
from ._register import below_autograd, cast_halves_to_float32, define, once_differentiable, place
from .backends.registry import forced_here, inherited, run
from .latent_distance import latent_distance_reference

_TENSORS = "Tensor images, Tensor[] encoder, Tensor query, Tensor? noise"


def expansion_distances(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """Mean distance between K VAEs' codes of M images and the query codes ([P] equation 6).

    Args:
        images: `[M,F]`, flattened C,H,W.
        encoder: [w1 `[K,F,h1]`, b1 `[K,h1]`, w2 `[K,h1,h2]`, b2, w_mu `[K,h2,L]`, b_mu, w_logsigma, b_logsigma], tanh
            between the layers; log sigma is clamped to [-8, 4].
        query: `[M,L]`, the active expert's codes.
        noise: `[K,M,L]`, codes are mu + sigma * noise; None: mean codes.

    Returns:
        `[K]` in float32 at least; NaN for M = 0. The codes are never written whole.

    Raises:
        ValueError: a shape or device; TypeError: a dtype (all tensors share one).

    Differentiable once, in every tensor. Runs in float32 under autocast.
    """
    return _forward(images, encoder, query, noise)


def expansion_distances_reference(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """Equation 6 in plain torch; same arguments and result as `expansion_distances`."""
    mu, logsigma = _vae.encode(images, encoder)
    codes = mu if noise is None else mu + logsigma.exp() * noise
    return latent_distance_reference(codes, query)


def _check(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> None:
    shapes = Shapes("expansion_distances")
    shapes.match("images", images, "M F")
    _vae.check_encoder(shapes, encoder)
    shapes.match("query", query, "M L")
    if noise is not None:
        shapes.match("noise", noise, "K M L")


def _kernel(*args: Any) -> torch.Tensor:
    _check(*args)
    return run("expansion_distances", *args) if len(args[0]) else _fake(*args).fill_(torch.nan)


def _fake(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    _check(images, encoder, query, noise)
    return images.new_empty(encoder[0].shape[0], dtype=at_least_float32(images.dtype))


def flat(images: torch.Tensor, encoder: Sequence[torch.Tensor], *rest: torch.Tensor | None) -> list:
    """The order in which `needs` and the gradients name the tensors: images, encoder, query, noise."""
    return [images, *encoder, *rest]


def _backward_kernel(grad: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    if not len(args[0]):
        return [x.zero_() for x in _backward_fake(grad, *args)]
    return run("expansion_distances_backward", grad, *args)


def _backward_fake(grad: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    *tensors, needs = args
    return [x.new_empty(x.shape) for x, need in zip(flat(*tensors), needs, strict=True) if need]


class _ExpansionDistances(torch.autograd.Function):
    """Autograd sees through no list, so the encoder arrives tensor by tensor."""

    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        *encoder, query, noise = rest
        ctx.backend = forced_here()
        ctx.save_for_backward(images, query, noise, *encoder)
        with below_autograd():
            return _forward(images, encoder, query, noise)

    @staticmethod
    @once_differentiable("expansion_distances")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        images, query, noise, *encoder = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with inherited(ctx.backend):
            return place(needs, _backward(grad, images, encoder, query, noise, needs))


def _autograd(*args: Any) -> torch.Tensor:
    tensors = flat(*args)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _ExpansionDistances.apply(*tensors)
    with below_autograd():
        return _forward(*args)


_forward = define("expansion_distances", f"({_TENSORS}) -> Tensor", _kernel, _fake, _autograd, cast_halves_to_float32)
_backward = define(
    "expansion_distances_backward",
    f"(Tensor grad, {_TENSORS}, bool[] needs) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
