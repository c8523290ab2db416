"""Losses whose gradients are computed along with them, while the activations are at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._register import once_differentiable


class LossWithGradients(torch.autograd.Function):
    """`apply(compute, on_host, *tensors)`: `compute()` gives the loss, the gradient of every tensor in their order, and
    whatever else it has to give, which has no gradient. Returns the loss and that.

    `on_host`: a look at the incoming gradient costs no wait, and one that is 1 no multiplication.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], list[torch.Tensor]], on_host: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_host = on_host
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
        if not (ctx.on_host and grad.item() == 1):
            grads = torch._foreach_mul(grads, grad)
        return None, None, *grads
