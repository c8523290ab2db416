"""Strided convolutions through the native kernels, with their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._register import once_differentiable
from ..strided_conv import strided_conv_reference, transposed_conv_reference

FEWEST_CHANNELS = 16
"""Of the fine grid; with fewer, vectors stay mostly empty and the call is left to torch."""


def strided_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See levit_kernels.strided_conv."""
    if weight.shape[1] < FEWEST_CHANNELS:
        return strided_conv_reference(x, weight, bias).contiguous()
    return _Convolution.apply(x, weight, bias, False)


def transposed_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See levit_kernels.transposed_conv."""
    if weight.shape[1] < FEWEST_CHANNELS:
        return transposed_conv_reference(x, weight, bias).contiguous()
    return _Convolution.apply(x, weight, bias, True)


class _Convolution(torch.autograd.Function):
    """Either direction between the grids; the gradient of x is the other one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, to_fine: bool) -> torch.Tensor:
        x, weight, kernel = x.contiguous(), weight.contiguous(), weight.shape[2]
        size = [2 * n + kernel - 4 if to_fine else (n + 2 - kernel) // 2 + 1 for n in x.shape[1:3]]
        ctx.save_for_backward(x, weight)
        ctx.to_fine = to_fine
        return _convolve(to_fine)(x, weight, bias.contiguous(), *size)

    @staticmethod
    @once_differentiable("strided_conv")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grad, grads = grad.contiguous(), [None, None, None, None]
        if ctx.needs_input_grad[0]:
            grads[0] = _convolve(not ctx.to_fine)(grad, weight, None, *x.shape[1:3])
        if ctx.needs_input_grad[1]:
            coarse, fine = (x, grad) if ctx.to_fine else (grad, x)
            grads[1] = torch.ops.levit_native.conv_weight_gradient(coarse, fine, weight.shape[2])
        if ctx.needs_input_grad[2]:
            grads[2] = grad.sum((0, 1, 2))
        return tuple(grads)


def _convolve(to_fine: bool) -> Any:
    return torch.ops.levit_native.conv_to_fine if to_fine else torch.ops.levit_native.conv_to_coarse
