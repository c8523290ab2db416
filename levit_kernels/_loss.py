"""Losses whose gradients are computed along with them, while the activations are at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._register import once_differentiable


class LossWithGradients(torch.autograd.Function):
    """`apply(compute, *tensors)`: `compute()` gives the loss, the gradient of every tensor in their order, and whatever
    else it has to give, which has no gradient. Returns the loss and that.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], list[torch.Tensor]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        loss, *found = compute()
        ctx.grads, others = found[: len(tensors)], found[len(tensors) :]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return loss, *others

    @staticmethod
    @once_differentiable("a training loss")
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple:
        # Handed over, not kept: whoever accumulates a gradient that nobody else holds need not copy it.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("levit_kernels: this loss was differentiated before; its gradients are gone")
        return (None, *(grads if grad.item() == 1 else [x * grad for x in grads]))
