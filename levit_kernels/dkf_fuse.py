"""dkf_fuse: equation 8 of SPEC.md over stored features."""

from __future__ import annotations

from typing import Any

import torch

from . import gates as gating
from ._check import Shapes
from ._register import below_autograd, define, once_differentiable, place
from .backends.registry import forced_here, inherited, run

_TENSORS = "Tensor features, Tensor gates, Tensor? index"


def dkf_fuse(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """Gated sum of K experts' features ([P] equation 8), gathered from a store of M rows.

    Args:
        features: `[M,K,N,E]`, any strides, E = H*d head by head; a bfloat16 store is read as such.
        gates: `[K]`, `[K,H]`, `[B,K,1]` or `[B,K,H]`, any floating dtype. An exact zero drops the expert (for that
            image, that head) whatever its features are, NaN included.
        index: int64 `[B]`, rows of the store, repeats allowed; None: all rows in order, B = M.

    Returns:
        `[B,N,E]` in `promote_types(features.dtype, gates.dtype)`; sums run in float32 at least. The gathered
        `[B,K,N,E]` is never written.

    Raises:
        ValueError: a shape or device; TypeError: a dtype; IndexError: a row outside [0, M) (on a GPU, which is not
            asked to wait, a device-side assertion).

    Differentiable once, in features and gates. The store is not touched for the gates' gradient but read. Autocast
    leaves the arguments as they are.
    """
    return _forward(features, gates, index)


def dkf_fuse_reference(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """Equation 8 in plain torch; same arguments and result as `dkf_fuse`."""
    return gating.gated_sum(features if index is None else features[index], gates)


def _check(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None) -> tuple[int, int, int]:
    shapes = Shapes("dkf_fuse")
    shapes.match("features", features, "M K N E", same_dtype=False)
    size = shapes.size
    if index is not None:
        if index.dtype != torch.int64:
            raise TypeError(f"dkf_fuse: index must be int64, got {index.dtype}")
        if index.ndim != 1:
            raise ValueError(f"dkf_fuse: index must have shape [B], got {list(index.shape)}")
        shapes.match_device("index", index.device)
        size["B"] = index.shape[0]
    else:
        size["B"] = size["M"]
    gating.check_gates(shapes, gates)
    if "H" in size and size["E"] % size["H"]:
        raise ValueError(
            f"dkf_fuse: gates have H={size['H']} heads, which must divide the features' last dimension E={size['E']}"
        )
    return size["B"], size["N"], size["E"]


def check_index(op: str, index: torch.Tensor, rows: int) -> None:
    """Raises IndexError in the name of `op` unless every entry of a CPU index lies in [0, rows)."""
    if index.is_cpu and index.numel():
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= rows:
            raise IndexError(
                f"{op}: index must lie in [0, M={rows}), got {low if low < 0 else high} (negative rows do not wrap)"
            )


def _kernel(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    size = _check(features, gates, index)
    if not size[0]:
        return _fake(features, gates, index)
    if index is not None:
        check_index("dkf_fuse", index, len(features))
    return run("dkf_fuse", features, gates, index)


def _fake(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    shape = _check(features, gates, index)
    return features.new_empty(shape, dtype=torch.promote_types(features.dtype, gates.dtype))


def _backward_kernel(*args: Any) -> list[torch.Tensor]:
    grad = args[0]
    if not len(grad):
        return [x.zero_() for x in _backward_fake(*args)]
    return run("dkf_fuse_backward", *args)


def _backward_fake(
    grad: torch.Tensor, features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None, needs: list[bool]
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, need in zip((features, gates), needs, strict=True) if need]


class _DkfFuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        ctx.backend = forced_here()
        ctx.save_for_backward(features, gates, index)
        with below_autograd():
            return _forward(features, gates, index)

    @staticmethod
    @once_differentiable("dkf_fuse")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        needs = ctx.needs_input_grad[:2]
        with inherited(ctx.backend):
            return (*place(needs, _backward(grad, *ctx.saved_tensors, needs)), None)


def _autograd(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    if torch.is_grad_enabled() and (features.requires_grad or gates.requires_grad):
        return _DkfFuse.apply(features, gates, index)
    with below_autograd():
        return _forward(features, gates, index)


_forward = define("dkf_fuse", f"({_TENSORS}=None) -> Tensor", _kernel, _fake, _autograd)
_backward = define(
    "dkf_fuse_backward", f"(Tensor grad, {_TENSORS}, bool[] needs) -> Tensor[]", _backward_kernel, _backward_fake
)
