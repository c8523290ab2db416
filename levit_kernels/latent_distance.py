"""latent_distance: the distance of equation 6 of SPEC.md between stored and fresh codes."""

from __future__ import annotations

from typing import Any

import torch

from ._check import Shapes, at_least_float32
from ._register import below_autograd, cast_halves_to_float32, define, once_differentiable, place
from .backends.registry import forced_here, inherited, run


def latent_distance(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Mean Euclidean distance of K sets of codes to one set ([P] equation 6): mean_m ||codes[k,m] - query[m]||.

    Args:
        codes: `[K,M,L]`, any strides; query: `[M,L]` of the same dtype.

    Returns:
        `[K]` in float32 at least (a distance in half precision could not be held against a threshold). M = 0 gives NaN,
        the mean of nothing.

    Raises:
        ValueError: a shape or device; TypeError: a dtype.

    Differentiable once, in both arguments; the gradient at distance zero is zero. Runs in float32 under autocast.
    """
    return _forward(codes, query)


def latent_distance_reference(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Equation 6 in plain torch; same arguments and result as `latent_distance`."""
    dtype = at_least_float32(codes.dtype)
    return torch.linalg.vector_norm(codes.to(dtype) - query.to(dtype), dim=-1).mean(1)


def _check(codes: torch.Tensor, query: torch.Tensor) -> None:
    shapes = Shapes("latent_distance")
    shapes.match("codes", codes, "K M L")
    shapes.match("query", query, "M L")


def _kernel(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    _check(codes, query)
    return run("latent_distance", codes, query) if len(query) else _fake(codes, query).fill_(torch.nan)


def _fake(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    _check(codes, query)
    return codes.new_empty(codes.shape[0], dtype=at_least_float32(codes.dtype))


def _backward_kernel(
    grad: torch.Tensor, codes: torch.Tensor, query: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor]:
    if not len(query):
        return _backward_fake(grad, codes, query, needs)
    return run("latent_distance_backward", grad, codes, query, needs)


def _backward_fake(
    grad: torch.Tensor, codes: torch.Tensor, query: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, need in zip((codes, query), needs, strict=True) if need]


class _LatentDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        ctx.backend = forced_here()
        ctx.save_for_backward(codes, query)
        with below_autograd():
            return _forward(codes, query)

    @staticmethod
    @once_differentiable("latent_distance")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        with inherited(ctx.backend):
            return place(ctx.needs_input_grad, _backward(grad, *ctx.saved_tensors, ctx.needs_input_grad))


def _autograd(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and (codes.requires_grad or query.requires_grad):
        return _LatentDistance.apply(codes, query)
    with below_autograd():
        return _forward(codes, query)


_forward = define(
    "latent_distance", "(Tensor codes, Tensor query) -> Tensor", _kernel, _fake, _autograd, cast_halves_to_float32
)
_backward = define(
    "latent_distance_backward",
    "(Tensor grad, Tensor codes, Tensor query, bool[] needs) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
