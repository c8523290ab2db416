"""task_attention on the CUDA kernels; what torch computes around them: composed/task_tokens.py.

Scores of queries with their own keys are the same for every image and reach the kernel computed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from ..composed import task_tokens
from .runtime import TYPES, Runtime, current


class ByHead(ctypes.Structure):
    """LevitByHead."""

    _fields_ = [(f"per_{x}", c_int64) for x in ("head", "image", "token")]


class Call(ctypes.Structure):
    """LevitTaskAttention."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "own_scores", "keys", "values", "own_values")),
        ("own_per_head", c_int64),
        ("out", c_void_p),
        ("out_by", ByHead),
        ("batch", c_int64),
        *((name, c_int32) for name in ("heads", "tokens", "groups", "patches", "depth")),
        ("scale", c_float),
        *((name, c_int32) for name in ("type", "shared_bytes")),
        ("grad", c_void_p),
        ("grad_by", ByHead),
        *((name, c_void_p) for name in ("attention", "by_scores", "own_attention", "by_own_score")),
    ]


class Tokens(task_tokens.Tokens):
    """With the CUDA kernels of both passes."""

    def keys_and_values(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base's, dense."""
        return super().keys_and_values(patches.contiguous())

    def attend(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        runtime, own_scores = current(), self._own_scores()
        call = self._call(runtime, keys, values, own_scores)
        as_it_lies = out if self.folded else out.permute(1, 2, 0, 3)
        call.out, call.out_by = runtime.result(as_it_lies), ByHead(*out.stride()[:3])
        runtime.start("levit_task_attention", call, keys.device)

    def attend_backward(self, keys: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        runtime, own_scores, results = current(), self._own_scores(), self.backward_results(keys)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        call = self._call(runtime, keys, values, own_scores)
        call.grad, call.grad_by = runtime.source(grad), ByHead(*grad.stride()[:3])
        for name, result in zip(("attention", "by_scores", "own_attention", "by_own_score"), results, strict=True):
            setattr(call, name, runtime.result(result))
        runtime.start("levit_task_attention_backward", call, keys.device)
        return results

    def _own_scores(self) -> torch.Tensor:
        return (self.query.float() * self.own_key.float()).sum(2) * self.scale

    def _call(self, runtime: Runtime, keys: torch.Tensor, values: torch.Tensor, own_scores: torch.Tensor) -> Call:
        """`own_scores` must live until the kernel has started."""
        call = _sizes(runtime, keys, *self.query.shape)
        call.query, call.own_scores = runtime.source(self.query), runtime.source(own_scores)
        call.keys, call.values = runtime.source(keys), runtime.source(values)
        call.own_values, call.own_per_head = runtime.source(self.own_value), self.own_value.stride(0)
        call.scale = self.scale
        return call


def task_attention(
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None,
) -> torch.Tensor:
    """See levit_kernels.task_attention."""
    return task_tokens.forward(Tokens.of(patches, tokens, wq, wk, wv, num_heads, scale), patches, wo, bo)


def refuse(op: str, args: tuple) -> str | None:
    """Why no kernel holds a call, or None."""
    tokens, patches, *_, heads, _ = args[1:10] if op.endswith("_backward") else args[:9]
    fewest = _sizes(current(), patches[:, :, None], 1, 1, tokens.shape[1])
    fits = current().library.levit_task_attention_fits(ctypes.byref(fewest))
    return None if fits else f"no block can hold the scores of N={patches.shape[1]}"


def _sizes(runtime: Runtime, keys: torch.Tensor, heads: int, tokens: int, depth: int) -> Call:
    call = Call(heads=heads, tokens=tokens, depth=depth, type=TYPES[keys.dtype])
    call.batch, call.patches, call.groups = keys.shape[:3]
    _, call.shared_bytes = runtime.gpu(keys.device)
    return call
