"""expert_attention: equations 2-4 of SPEC.md for K experts at once, and equation 8 where gates are given."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from . import gates as gating
from ._check import Shapes, at_least_float32
from ._register import below_autograd, cast_floats, define, once_differentiable, place
from .backends.registry import choose, forced_here, inherited, run

_TENSORS = (
    "Tensor patches, Tensor w_embed, Tensor b_embed, Tensor w_qkv, Tensor b_qkv, Tensor? gates, float negative_slope"
)
_DEFAULTS = _TENSORS.replace("gates", "gates=None").replace("negative_slope", "negative_slope=0.2")


def expert_attention(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None = None,
    negative_slope: float = 0.2,
) -> torch.Tensor:
    """Multi-head self-attention of K experts over the patches of each image ([P] equations 2-4, 8).

    Args:
        patches: `[B,N,P]`, any strides; B may be 0.
        w_embed, b_embed: `[K,P,Q]`, `[K,Q]`, BatchNorm folded in.
        w_qkv, b_qkv: `[K,Q,3,H,d]`, `[K,3,H,d]`: query, key, value of every head.
        gates: None, or `[K]`, `[K,H]`, `[B,K,1]`, `[B,K,H]` in any floating dtype. An exact zero drops the expert (for
            that image, that head) whatever it computes, NaN included, and where it can be seen the work is skipped.
        negative_slope: of the LeakyReLU behind the embedding, >= 0.

    Returns:
        Without gates `[K,B,N,H*d]` in the patches' dtype. With gates the gated sum `[B,N,H*d]` in
        `promote_types(patches.dtype, gates.dtype)`; the K outputs are never written.

    Raises:
        ValueError: a shape, device or slope; TypeError: a dtype (patches, weights and biases share one).

    Sums and softmax run in float32 at least. Differentiable once, in every tensor argument. Under autocast all float32
    arguments but the gates are cast to the autocast dtype.
    """
    return _forward(patches, w_embed, b_embed, w_qkv, b_qkv, gates, negative_slope)


def expert_attention_reference(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None = None,
    negative_slope: float = 0.2,
) -> torch.Tensor:
    """Equations 2-4 and 8 in plain torch; same arguments and result as `expert_attention`."""
    outputs, *_ = reference_stages(patches, w_embed, b_embed, w_qkv, b_qkv, negative_slope)
    return outputs if gates is None else gating.gated_sum(outputs.transpose(0, 1), gates)


def reference_stages(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    negative_slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> outputs `[K,B,N,H*d]`, tokens `[K,B,N,Q]`, qkv `[K,B,N,3,H,d]`, attention `[K,H,B,N,N]`."""
    embedded = torch.einsum("bnp,kpq->kbnq", patches, w_embed) + b_embed[:, None, None]
    tokens = F.leaky_relu(embedded, negative_slope)  # equation 2
    qkv = torch.einsum("kbnq,kqshd->kbnshd", tokens, w_qkv) + b_qkv[:, None, None]
    query, key, value = qkv.permute(3, 0, 4, 1, 2, 5)  # each [K,H,B,N,d]
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    attention = torch.softmax(scores, -1, dtype=at_least_float32(scores.dtype)).to(scores.dtype)
    heads = attention @ value  # equation 3
    return heads.permute(0, 2, 3, 1, 4).flatten(3), tokens, qkv, attention  # equation 4


def _check(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> dict[str, int]:
    shapes = Shapes("expert_attention")
    shapes.match("patches", patches, "B N P")
    shapes.match("w_embed", w_embed, "K P Q")
    shapes.match("b_embed", b_embed, "K Q")
    shapes.match("w_qkv", w_qkv, "K Q 3 H d")
    shapes.match("b_qkv", b_qkv, "K 3 H d")
    if gates is not None:
        gating.check_gates(shapes, gates)
    if not 0 <= negative_slope < math.inf:
        raise ValueError(f"expert_attention: negative_slope must be finite and >= 0, got {negative_slope}")
    return shapes.size


def _kernel(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    size = _check(*args)
    return run("expert_attention", *args) if size["B"] else _fake(*args)


def _fake(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    size, patches, gates = _check(*args), args[0], args[5]
    width = size["H"] * size["d"]
    if gates is None:
        return patches.new_empty(size["K"], size["B"], size["N"], width)
    return patches.new_empty(size["B"], size["N"], width, dtype=torch.promote_types(patches.dtype, gates.dtype))


def _with_defaults(args: tuple) -> tuple:
    """The dispatcher drops trailing arguments that equal the schema's defaults."""
    return args + (None, 0.2)[len(args) - 5 :]


def _train_kernel(*args: Any) -> list[torch.Tensor]:
    size = _check(*args)
    return run("expert_attention_train", *args) if size["B"] else _train_fake(*args)


def _train_fake(*args: Any) -> list[torch.Tensor]:
    out, patches, w_qkv = _fake(*args), args[0], args[3]
    batch, tokens = patches.shape[:2]
    _, width, _, heads, depth = w_qkv.shape
    new = patches.new_empty
    return [
        out,
        new(batch, tokens, width),
        new(batch, tokens, 3, heads, depth),
        new(heads, batch, tokens, tokens),
    ]


def _backward_kernel(*args: Any) -> list[torch.Tensor]:
    if not args[1].shape[0]:
        return [x.zero_() for x in _backward_fake(*args)]
    tensors = (x for x, need in zip(_tensors(args[1:]), args[-1], strict=True) if need)
    return [_laid_out_like(x, grad) for x, grad in zip(tensors, run("expert_attention_backward", *args), strict=True)]


def _laid_out_like(tensor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`grad` with the strides of the weight whose gradient it is, so that an optimizer need not turn it around."""
    like = torch.empty_like(tensor)
    return grad if grad.stride() == like.stride() else like.copy_(grad)


def _tensors(args: tuple) -> list[torch.Tensor | None]:
    return [x for x in args[:-2] if isinstance(x, torch.Tensor) or x is None]


def _backward_fake(grad: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x, need in zip(_tensors(args), args[-1], strict=True) if need]


class _ExpertAttention(torch.autograd.Function):
    """One expert (the active one) keeps tokens, q, k, v and attention, unless its backend would rather recompute them
    than read them back; of several, each is recomputed in its turn.

    How what is kept is laid out only the backend knows that kept it, and its backward pass is the one that runs.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.backend, ctx.negative_slope = forced_here(), args[6]
        with below_autograd():
            if args[1].shape[0] == 1 and "expert_attention_train" in choose("expert_attention", args).ops:
                ctx.backend = choose("expert_attention_train", args).name
                out, *saved = _train(*args)
            else:
                out, saved = _forward(*args), ()
        ctx.save_for_backward(*args[:6], *saved)
        return out

    @staticmethod
    @once_differentiable("expert_attention")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[:6]
        with inherited(ctx.backend):
            grads = _backward(grad, *tensors[:6], ctx.negative_slope, list(tensors[6:]), needs)
        return (*place(needs, grads), None)


def _autograd(*args: Any) -> torch.Tensor:
    args = _with_defaults(args)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:6]):
        return _ExpertAttention.apply(*args)
    with below_autograd():
        return _forward(*args)


def _cast(dtype: torch.dtype, args: tuple) -> tuple:
    return (*cast_floats(dtype, args[:5]), *args[5:])


_forward = define("expert_attention", f"({_DEFAULTS}) -> Tensor", _kernel, _fake, _autograd, _cast)
_train = define("expert_attention_train", f"({_TENSORS}) -> Tensor[]", _train_kernel, _train_fake)
_backward = define(
    "expert_attention_backward",
    f"(Tensor grad, {_TENSORS}, Tensor[] saved, bool[] needs) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
