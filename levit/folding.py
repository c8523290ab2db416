"""Batch norm behind a linear map, folded into the map's weights, with the statistics of the batch at hand.

Mean and variance of x·W + b over the rows of x follow from mean and covariance of x ([D], SPEC.md, Modes). So the map
need not be evaluated twice, once to learn its statistics, and x·W + b need not exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fold_batch_norm(linear: nn.Linear, norm: nn.BatchNorm1d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] with which `linear` alone does what `linear_norm` does on the batch x [rows, in].

    Like it, this moves the running statistics, and the bias of `linear`, which cancels, gets no gradient. Nor does x.
    """
    with torch.no_grad():
        rows, mean = len(x), x.mean(0)
        centred = x - mean
        covariance = (centred.t() @ centred).div_(rows)
        weighted = linear.weight @ covariance
        variance = (weighted * linear.weight).sum(1)
        center = linear.weight @ mean
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(center + linear.bias, norm.momentum)
        norm.running_var.lerp_(variance * (rows / (rows - 1)), norm.momentum)
        deviation = torch.rsqrt(variance + norm.eps)
    return _Fold.apply(linear.weight, norm.weight, norm.bias, mean, weighted, center, deviation)


class _Fold(torch.autograd.Function):
    """w = W·scale and b = β − (W·mean)·scale, scale = γ / √(variance + ε); `deviation` is 1 / √(variance + ε)."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        gain: Tensor,
        shift: Tensor,
        mean: Tensor,
        weighted: Tensor,
        center: Tensor,
        deviation: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scale = gain * deviation
        ctx.save_for_backward(weight, mean, weighted, center, deviation, scale)
        return weight * scale[:, None], shift - center * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_w: Tensor, by_b: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, weighted, center, deviation, scale = ctx.saved_tensors
        by_scale = (by_w * weight).sum(1) - by_b * center
        by_variance = by_scale * scale * deviation.square()  # of half the variance, negated
        by_weight = by_w * scale[:, None]
        by_weight.addr_(by_b * scale, mean, alpha=-1).addcmul_(weighted, by_variance[:, None], value=-1)
        return by_weight, by_scale * deviation, by_b, None, None, None, None
