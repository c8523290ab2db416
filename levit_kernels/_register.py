"""How an op meets the dispatcher: schema, CPU and CUDA kernels, fake, autograd, autocast.

`torch.library.Library` rather than `custom_op`: the same guarantees (opcheck passes) at a few microseconds less per
call, and the autograd kernel may call a variant of the op that keeps what its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

LIBRARY = torch.library.Library("levit_kernels", "DEF")
_AUTOCAST = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
_HALF = (torch.float16, torch.bfloat16)


def define(
    name: str,
    signature: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    cast: Callable[[torch.dtype, tuple], tuple] | None = None,
) -> Callable[..., Any]:
    """Registers levit_kernels::name and returns its overload.

    `kernel` runs below autograd for CPU and CUDA, `fake` gives shapes and dtypes, `autograd` replaces the op where a
    gradient is asked for, `cast(dtype, args)` is the autocast rule (None: arguments stay as they are).
    """
    LIBRARY.define(f"{name}{signature}")
    overload = getattr(torch.ops.levit_kernels, name).default
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"levit_kernels::{name}", fake, lib=LIBRARY)
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    for device, key in _AUTOCAST.items():
        LIBRARY.impl(name, _autocast(overload, device, DispatchKeySet(key), cast), key.name)
    return overload


def _autocast(
    overload: Callable[..., Any], device: str, key: DispatchKeySet, cast: Callable[..., Any] | None
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        # excluded below this point in any case: torch calls inside a kernel must not be cast a second time
        with torch._C._ExcludeDispatchKeyGuard(key):
            return overload(*(cast(torch.get_autocast_dtype(device), args) if cast else args))

    return run


def cast_floats(dtype: torch.dtype, args: tuple) -> tuple:
    """Every floating tensor (float64 excepted, as in torch's own rules) to `dtype`."""
    return tuple(_cast(x, dtype) for x in args)


def cast_halves_to_float32(dtype: torch.dtype, args: tuple) -> tuple:
    """Distances and losses run in float32 under autocast, like torch's norms and losses."""
    return tuple(_cast(x, torch.float32) for x in args)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 or value.dtype in _HALF else value
    if isinstance(value, (list, tuple)):
        return [_cast(x, dtype) for x in value]
    return value


below_autograd = torch._C._AutoDispatchBelowAutograd


def once_differentiable(op: str) -> Callable[..., Any]:
    """Decorates a Function.backward; differentiating its result raises and names the op.

    torch's own decorator only notices when the incoming gradient requires grad, so a gradient penalty on a plain loss
    would silently be taken for a constant.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(ctx: Any, *by_outputs: torch.Tensor) -> tuple:
            with torch.no_grad():
                grads = backward(ctx, *by_outputs)
            if not torch.is_grad_enabled():
                return grads
            message = f"levit_kernels.{op} is differentiable once: its gradient has no gradient of its own"
            given = [g for g in grads if g is not None]
            trap = torch._C._functions.DelayedError(message.encode(), len(given))
            trapped = iter(trap(*(g.detach().requires_grad_() for g in given)))
            return tuple(None if g is None else next(trapped) for g in grads)

        return run

    return decorate


def place(needs: tuple[bool, ...], grads: list[torch.Tensor]) -> tuple:
    """Spreads the gradients that were computed over the arguments that asked for them."""
    left = iter(grads)
    return tuple(next(left) if need else None for need in needs)
