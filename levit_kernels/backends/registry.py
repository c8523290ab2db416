"""Chooses a backend for a call, says why, and raises exactly that reason where a forced backend cannot run."""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger("levit_kernels")
ENVIRONMENT = "LEVIT_KERNELS_BACKEND"
NAMES = ("cuda", "triton", "cpu", "torch", "reference")  # the order of the automatic choice
_forced: ContextVar[str | None] = ContextVar("levit_kernels_backend", default=None)
_told: set[str] = set()


class BackendError(RuntimeError):
    """A forced backend cannot run the op; the message carries its reason."""


@dataclass(frozen=True)
class Backend:
    """A table of ops, and two answers: `unavailable()`, why it cannot run at all in this process, or None;
    `refuse(op, args)`, why it does not take this call, or None. `serves(device type)`,
    whether it is for such tensors at all: where it is not, nobody needs to know why it is unavailable.
    `explain(op, args)`: why it takes a call, where there is more to say than that it can.
    """

    name: str
    ops: dict[str, Callable[..., Any]]
    refuse: Callable[[str, tuple], str | None]
    unavailable: Callable[[], str | None] = field(default=lambda: None)
    serves: Callable[[str], bool] = field(default=lambda device: True)
    explain: Callable[[str, tuple], str] = field(default=lambda op, args: "")

    def reason_against(self, op: str, args: tuple) -> str | None:
        """Why this backend does not take the call, or None."""
        if op not in self.ops:
            return (None if self.ops else self.unavailable()) or f"has no kernel for {op}"
        return self.unavailable() or self.refuse(op, args)

    def can_run(self, op: str, args: tuple, raise_error: bool = False) -> bool:
        """Whether this backend takes the call. Raises BackendError with the reason if not and `raise_error`."""
        if raise_error and (reason := self.reason_against(op, args)):
            raise BackendError(f"levit_kernels.{op}: backend '{self.name}' was forced but cannot run: {reason}")
        return (
            op in self.ops
            and self.serves(device_of(args).type)
            and self.unavailable() is None
            and self.refuse(op, args) is None
        )


def backends() -> dict[str, Backend]:
    """All backends in the order of the automatic choice."""
    if not _backends:
        from . import cpu, reference
        from . import cuda as cuda_backend
        from . import torch as torch_backend
        from . import triton as triton_backend

        for module in (cuda_backend, triton_backend, cpu, torch_backend, reference):
            _backends[module.BACKEND.name] = module.BACKEND
    return _backends


_backends: dict[str, Backend] = {}


def forced() -> str | None:
    """The backend forced by `use_backend` here, else by the environment, else None."""
    name = _forced.get()
    if name is None:
        name = os.environ.get(ENVIRONMENT) or None
        if name is not None and name not in NAMES:
            raise ValueError(f"{ENVIRONMENT} must be one of {', '.join(NAMES)}, got {name!r}")
    return name


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Forces a backend ("cuda", "triton", "cpu", "torch" or "reference") in this thread or task; None lifts the force.

    An op that the backend cannot run raises BackendError with the reason. A backward pass runs on the backend that was
    forced when its forward ran.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"use_backend: name must be one of {', '.join(NAMES)}, got {name!r}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_here() -> str | None:
    """What `use_backend` forces here, without the environment: a backward pass may run in another thread."""
    return _forced.get()


def inherited(name: str | None) -> AbstractContextManager[None]:
    """The force that an op's forward ran under, for its backward."""
    return nullcontext() if name is None else use_backend(name)


def choose(op: str, args: tuple) -> Backend:
    """The forced backend, or the first in order that takes the call."""
    table = _backends or backends()
    name = forced()
    if name is not None:
        table[name].can_run(op, args, raise_error=True)
        return table[name]
    device = device_of(args).type
    for backend in table.values():
        if op not in backend.ops or not backend.serves(device):
            continue
        missing = backend.unavailable()
        if missing is None and backend.refuse(op, args) is None:
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s: %s (%s)", op, backend.name, _reasons_against(op, args, before=backend.name))
            return backend
        if missing is not None and backend.name not in _told:
            _told.add(backend.name)
            warnings.warn(
                f"levit_kernels: the '{backend.name}' backend would run {op} faster but is not available: {missing}",
                stacklevel=2,
            )
    raise BackendError(f"levit_kernels.{op}: no backend takes this call: {_reasons_against(op, args)}")


def _reasons_against(op: str, args: tuple, before: str | None = None) -> str:
    passed = itertools.takewhile(lambda backend: backend.name != before, backends().values())
    return "; ".join(f"{backend.name}: {backend.reason_against(op, args)}" for backend in passed)


def find_kernel(op: str, *args: Any) -> Callable[..., Any] | None:
    """The kernel of this package that takes a call, None where that would be plain torch."""
    name = forced()
    for asked in NAMES if name is None else (name,):
        if asked not in ("torch", "reference") and backends()[asked].can_run(op, args):
            return backends()[asked].ops[op]
    return None


def has_kernel(op: str, *args: Any) -> bool:
    """Whether a kernel of this package would compute this call, and not plain torch."""
    return find_kernel(op, *args) is not None


def run_or(plain: Callable[..., Any], op: str, *args: Any) -> Any:
    """Computes `op` by a kernel where one takes it, else by `plain`, even where a backend is forced that has none: for
    what is no op of its own to a user.
    """
    return run(op, *args) if has_kernel(op, *args) else plain(*args)


def run(op: str, *args: Any) -> Any:
    """Computes `op` on the chosen backend."""
    return choose(op, args).ops[op](*args)


def device_of(args: tuple) -> torch.device:
    """Where the call happens: every op has a tensor first, or a list of some."""
    first = args[0]
    return first.device if isinstance(first, torch.Tensor) else first[0].device
