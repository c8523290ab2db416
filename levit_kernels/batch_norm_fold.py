"""Batch norm behind a linear map, folded into the map's weights, with the statistics of the batch at hand.

Mean and variance of x wT + b over the rows of x follow from mean and covariance of x ([D], SPEC.md, Modes). So the map
need not be evaluated twice, once to learn its statistics, and x wT + b need not exist.
"""

from __future__ import annotations

from typing import Any

import torch

from ._check import Shapes
from ._register import once_differentiable
from .backends.registry import forced_here, inherited, run_or


def batch_norm_fold(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    bias: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    momentum: float = 0.1,
    epsilon: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias with which the linear map alone does what it and batch norm do on the batch x.

    Args:
        x: `[R,P]`, R >= 2. It gets no gradient.
        weight: `[Q,P]`, as nn.Linear keeps it.
        gain, shift: `[Q]`, of batch norm.
        bias: `[Q]`, of the linear map: the batch mean takes it out again, so it has no gradient.
        running: mean `[Q]`, unbiased variance `[Q]` and int64 `[]`, the number of batches they have seen; they move.
        momentum: share of this batch in the running statistics.
        epsilon: of batch norm.

    Returns:
        w `[Q,P]` and b `[Q]`, differentiable once in weight, gain and shift.

    Raises:
        ValueError: a shape or device; TypeError: a dtype (all floating tensors share one).
    """
    shapes = Shapes("batch_norm_fold", may_be_empty="")
    shapes.match("x", x, "R P")
    shapes.match("weight", weight, "Q P")
    for name, tensor in (
        ("gain", gain),
        ("shift", shift),
        ("bias", bias),
        *zip(("mean", "var"), running, strict=False),
    ):
        shapes.match(name, tensor, "Q")
    if len(x) < 2:
        raise ValueError("batch_norm_fold: x must have R >= 2, batch norm knows no variance of one row")
    return _Fold.apply(x.detach(), weight, gain, shift, bias.detach(), running, momentum, epsilon)


class _Fold(torch.autograd.Function):
    """w = W scale and b = shift - (W mean) scale, scale = gain deviation, deviation = 1 / sqrt(variance + epsilon)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, *rest: Any) -> tuple:
        ctx.backend = forced_here()
        w, b, *kept = run_or(batch_norm_fold_composed, "batch_norm_fold", x, weight, gain, *rest)
        ctx.save_for_backward(weight, gain, *kept)
        return w, b

    @staticmethod
    @once_differentiable("batch_norm_fold")
    def backward(ctx: Any, by_w: torch.Tensor, by_b: torch.Tensor) -> tuple:
        with inherited(ctx.backend):
            args = by_w, by_b, *ctx.saved_tensors
            by_weight, by_gain = run_or(batch_norm_fold_backward_composed, "batch_norm_fold_backward", *args)
        return None, by_weight, by_gain, by_b, None, None, None, None


def batch_norm_fold_composed(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    bias: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    momentum: float,
    epsilon: float,
) -> list[torch.Tensor]:
    """In plain torch; -> w, b, and for the backward pass mean `[P]` and covariance of x times weight `[Q,P]`, mean of
    x wT and deviation `[Q]`.
    """
    rows, mean = len(x), x.mean(0)
    centred = x - mean
    covariance = (centred.t() @ centred).div_(rows)
    weighted = weight @ covariance
    variance = (weighted * weight).sum(1)
    center = weight @ mean
    running_mean, running_var, batches = running
    batches.add_(1)
    running_mean.lerp_(center + bias, momentum)
    running_var.lerp_(variance * (rows / (rows - 1)), momentum)
    deviation = torch.rsqrt(variance + epsilon)
    scale = gain * deviation
    return [weight * scale[:, None], shift - center * scale, mean, weighted, center, deviation]


def batch_norm_fold_backward_composed(
    by_w: torch.Tensor,
    by_b: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    weighted: torch.Tensor,
    center: torch.Tensor,
    deviation: torch.Tensor,
) -> list[torch.Tensor]:
    """In plain torch; -> gradients of weight and gain."""
    scale = gain * deviation
    by_scale = (by_w * weight).sum(1) - by_b * center
    by_variance = by_scale * scale * deviation.square()  # of half the variance, negated
    by_weight = by_w * scale[:, None]
    by_weight.addr_(by_b * scale, mean, alpha=-1).addcmul_(weighted, by_variance[:, None], value=-1)
    return [by_weight, by_scale * deviation]
