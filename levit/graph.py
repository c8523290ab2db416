"""A step of training as one CUDA graph: launched once, whatever number of kernels it has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3
"""Steps that run as they are before one is captured: kernels get compiled, libraries and optimizers their memory."""


class CapturedStep:
    """Does what `step` does, from its fourth call on by replaying it.

    The calls before are real steps too, so nothing is done twice, and capturing one does nothing.

    Args:
        step: takes tensors, of the same shapes at every call, and returns one. It must not wait for the device, nor
            allocate what later calls look for; whatever else it reads and writes must stay where it is in memory.
    """

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        with torch.cuda.device(inputs[0].device):
            self._calls += 1
            if self._calls <= WARM_UP:
                return self._run(inputs)
            if self._graph is None:
                self._capture(inputs)
            for kept, given in zip(self._inputs, inputs, strict=True):
                kept.copy_(given)
            self._graph.replay()
            return self._result.clone()

    def _run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """On another stream: what autograd remembers of the default one could not be captured."""
        stream, outer = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            result = self._step(*inputs)
        outer.wait_stream(stream)
        return result

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [given.clone() for given in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self._step(*self._inputs)
        self._graph = graph
