"""How a kernel starts: on its tensors' device, or, for the static checks, into a list instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton

Listener = Callable[["Launch"], bool]
_listener: ContextVar[Listener | None] = ContextVar("levit_kernels_triton_listener", default=None)


class Launch(NamedTuple):
    """A kernel with everything it is started with; `meta` holds constexprs and compiler options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    meta: dict[str, Any]
    threads: int


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` of every launch inside; the kernel starts only where it returns True."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, threads: int, **meta: Any) -> None:
    """Starts `kernel` on the device of its first tensor; an empty grid is no launch.

    `threads`, not warps: AMD's have twice as many lanes, and what a thread holds in registers is what matters.
    """
    if 0 in grid:
        return
    listener = _listener.get()
    if listener is not None and not listener(Launch(kernel, grid, args, meta, threads)):
        return
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, num_warps=threads // (64 if torch.version.hip else 32), **meta)


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot.

    Where torch does not allow TF32, NVIDIA's matrix units take float32 numbers as sums of two TF32 numbers, rounded:
    that keeps 22 to 24 bits of every product. FMA loops would want more registers for their operands than there are.
    AMD's units take float32 as it is.
    """
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def near(weight: torch.Tensor) -> torch.Tensor:
    """A stack of matrices whose numbers lie within 2**31 of their matrix's first, as kernels assume of weights."""
    reach = sum((size - 1) * stride for size, stride in zip(weight.shape[1:], weight.stride()[1:], strict=True))
    return weight if reach < 2**31 else weight.contiguous()


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is neither below n nor below `least`."""
    return max(least, triton.next_power_of_2(n))
