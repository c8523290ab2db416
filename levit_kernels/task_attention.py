"""task_attention: the attention of DyTox's decoder, for all task tokens in one pass."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ._check import Shapes, at_least_float32
from ._register import below_autograd, cast_floats, define, once_differentiable, place
from .backends.registry import forced_here, inherited, run

_TENSORS = (
    "Tensor tokens, Tensor patches, Tensor wq, Tensor wk, Tensor wv, Tensor wo, Tensor bo, int num_heads, float? scale"
)


def task_attention(
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of T task tokens, each over [itself ; patches]; tokens never see each other (DyTox).

    Args:
        tokens: `[T,D]`, parameters, the same for every image.
        patches: `[B,N,D]`, any strides; B may be 0.
        wq, wk, wv: `[D,D]` in the layout of torch.nn.Linear (y = x w^T), without biases.
        wo, bo: `[D,D]`, `[D]`, the output projection.
        num_heads: H, which divides D; a head is D/H wide.
        scale: of the scores, finite; None: (D/H)^-0.5.

    Returns:
        `[B,T,D]`: what T separate passes, one per token, give.

    Raises:
        ValueError: a shape, device, num_heads or scale; TypeError: a dtype (all tensors share one).

    Sums and softmax run in float32 at least. Differentiable once, in every tensor. Under autocast all arguments are
    cast. Products are reassociated where that saves operations: an infinite argument gives results that are not finite
    where the reference's are not, but infinite and NaN may change places.
    """
    return _forward(tokens, patches, wq, wk, wv, wo, bo, num_heads, scale)


def task_attention_reference(
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None = None,
) -> torch.Tensor:
    """T separate passes in plain torch, as published; same arguments and result as `task_attention`."""
    width = tokens.shape[1] // num_heads
    scale = width**-0.5 if scale is None else scale
    outputs = []
    for token in tokens:
        rows = torch.cat([token.expand(len(patches), 1, -1), patches], 1)
        query = F.linear(rows[:, :1], wq)
        query, key, value = (
            x.unflatten(-1, (num_heads, width)).transpose(1, 2) for x in (query, F.linear(rows, wk), F.linear(rows, wv))
        )
        scores = query @ key.transpose(-1, -2) * scale
        attention = torch.softmax(scores, -1, dtype=at_least_float32(scores.dtype)).to(scores.dtype)
        outputs.append(F.linear((attention @ value).transpose(1, 2).flatten(2), wo, bo))
    return torch.cat(outputs, 1)


def _check(
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None,
) -> None:
    shapes = Shapes("task_attention")
    shapes.match("tokens", tokens, "T D")
    shapes.match("patches", patches, "B N D")
    for name, weight in (("wq", wq), ("wk", wk), ("wv", wv), ("wo", wo)):
        shapes.match(name, weight, "D D")
    shapes.match("bo", bo, "D")
    if num_heads < 1 or shapes.size["D"] % num_heads:
        raise ValueError(f"task_attention: num_heads must be >= 1 and divide D={shapes.size['D']}, got {num_heads}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"task_attention: scale must be finite, got {scale}")


def _with_defaults(args: tuple) -> tuple:
    """The dispatcher drops a trailing argument that equals the schema's default."""
    return args if len(args) == 9 else (*args, None)


def _kernel(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    _check(*args)
    return run("task_attention", *args) if len(args[1]) else _fake(*args)


def _fake(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    _check(*args)
    tokens, patches = args[:2]
    return patches.new_empty(patches.shape[0], *tokens.shape)


def _backward_kernel(*args: Any) -> list[torch.Tensor]:
    if not len(args[0]):
        return [x.zero_() for x in _backward_fake(*args)]
    return run("task_attention_backward", *args)


def _backward_fake(grad: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    *inputs, _num_heads, _scale, needs = args
    return [x.new_empty(x.shape) for x, need in zip(inputs, needs, strict=True) if need]


class _TaskAttention(torch.autograd.Function):
    """Nothing but the arguments is kept: recomputing keys and values costs a third of what the gradient costs."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.backend, ctx.options = forced_here(), args[7:]
        ctx.save_for_backward(*args[:7])
        with below_autograd():
            return _forward(*args)

    @staticmethod
    @once_differentiable("task_attention")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        needs = ctx.needs_input_grad[:7]
        with inherited(ctx.backend):
            grads = _backward(grad, *ctx.saved_tensors, *ctx.options, needs)
        return (*place(needs, grads), None, None)


def _autograd(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    if torch.is_grad_enabled() and any(x.requires_grad for x in args[:7]):
        return _TaskAttention.apply(*args)
    with below_autograd():
        return _forward(*args)


_forward = define("task_attention", f"({_TENSORS}=None) -> Tensor", _kernel, _fake, _autograd, cast_floats)
_backward = define(
    "task_attention_backward", f"(Tensor grad, {_TENSORS}, bool[] needs) -> Tensor[]", _backward_kernel, _backward_fake
)
