"""Convolutions of stride 2 and padding 1 and their transposed ones, channels last: the layers of convolutional VAEs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._check import Shapes
from ._register import cast_floats
from .backends.registry import run


def strided_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What `torch.nn.functional.conv2d` gives with stride 2 and padding 1.

    Args:
        x: `[B,H,W,F]`, pixels; B may be 0, H and W are k - 2 at least.
        weight: `[C,F,k,k]`, as nn.Conv2d keeps it.
        bias: `[C]`.

    Returns:
        `[B,(H+2-k)//2+1,(W+2-k)//2+1,C]`, dense, differentiable once in every argument.

    Raises:
        ValueError: a shape or device; TypeError: a dtype (all tensors share one).

    Under autocast all arguments are cast.
    """
    x, weight, bias = _cast(x, weight, bias)
    shapes = Shapes("strided_conv")
    shapes.match("x", x, "B H W F")
    shapes.match("weight", weight, "C F k k")
    shapes.match("bias", bias, "C")
    kernel = weight.shape[2]
    if min(x.shape[1:3]) + 2 < kernel:
        raise ValueError(f"strided_conv: x must have at least {kernel - 2} rows and columns, got {list(x.shape)}")
    return run("strided_conv", x, weight, bias)


def transposed_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What `torch.nn.functional.conv_transpose2d` gives with stride 2 and padding 1.

    Args:
        x: `[B,H,W,C]`, pixels; B may be 0.
        weight: `[C,F,k,k]`, as nn.ConvTranspose2d keeps it, k at least 2.
        bias: `[F]`.

    Returns:
        `[B,2H+k-4,2W+k-4,F]`, dense, differentiable once in every argument.

    Raises:
        ValueError: a shape or device; TypeError: a dtype (all tensors share one).

    Under autocast all arguments are cast.
    """
    x, weight, bias = _cast(x, weight, bias)
    shapes = Shapes("transposed_conv")
    shapes.match("x", x, "B H W C")
    shapes.match("weight", weight, "C F k k")
    shapes.match("bias", bias, "F")
    if weight.shape[2] < 2 or 2 * min(x.shape[1:3]) + weight.shape[2] < 5:
        raise ValueError(f"transposed_conv: weight must have taps that leave pixels, got {list(weight.shape)}")
    return run("transposed_conv", x, weight, bias)


def strided_conv_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride=2, padding=1).permute(0, 2, 3, 1)


def transposed_conv_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    return F.conv_transpose2d(x.permute(0, 3, 1, 2), weight, bias, stride=2, padding=1).permute(0, 2, 3, 1)


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device = tensors[0].device.type
    return cast_floats(torch.get_autocast_dtype(device), tensors) if torch.is_autocast_enabled(device) else tensors
