"""task_attention on the CUDA kernels: torch computes what is one large matrix product, a kernel all that lies between.

The kernel serves both forms that `folds` chooses from:

- Projected: G = H groups of T queries, against keys and values of C = d columns that a product made of the patches.
- Folded: one group of H*T queries that went through W_k, against the patches themselves, C = D; W_v follows.

In both a token is one more key and value for its own query. Scores of queries with their own keys are the same for
every image and reach the kernel computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from ..composed.linear import matmul
from ..composed.task_attention import tiles
from ..composed.task_forms import folds
from .runtime import TYPES, Runtime, current

SCRATCH_BYTES = 256 << 20  # of keys, values and weighted sums at a time


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


@dataclass(frozen=True)
class Tokens:
    """What the tokens of a call bring to every image."""

    folded: bool
    plain_query: torch.Tensor
    """`[H,T,d]`"""
    query: torch.Tensor
    """`[H,T,C]`"""
    own_key: torch.Tensor
    """`[H,T,C]`; where folded the tokens themselves, for every head the same."""
    own_value: torch.Tensor
    """`[H,T,C]`, as own_key."""
    wk: torch.Tensor
    wv: torch.Tensor
    """Of the heads, `[H,d,D]`, as wk."""
    scale: float

    def parts(self, patches: torch.Tensor) -> Iterator[slice]:
        """Images that need no more than SCRATCH_BYTES."""
        (heads, tokens, depth), length = self.query.shape, patches.shape[1]
        numbers = 2 * heads * depth * (tokens if self.folded else length) + 2 * heads * tokens * length
        return tiles(patches, numbers, SCRATCH_BYTES)

    def keys_and_values(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """patches `[b,N,D]` -> twice `[b,N,G,C]`, dense."""
        if self.folded:
            patches = patches.contiguous()[:, :, None]
            return patches, patches
        shape = (*patches.shape[:2], len(self.query), -1)
        keys, values = (matmul(patches.flatten(0, 1), w.flatten(0, 1).t()).view(shape) for w in (self.wk, self.wv))
        return keys, values

    def mix(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The sums of values and the own ones by attention, `[H,b,T,C]`."""
        runtime, (heads, tokens, depth), images = current(), self.query.shape, len(keys)
        room = keys.new_empty((heads, images, tokens, depth) if self.folded else (images, tokens, heads, depth))
        mixed = room if self.folded else room.permute(2, 0, 1, 3)
        own_scores = self._own_scores()
        call = self._call(runtime, keys, values, own_scores)
        call.out, call.out_by = runtime.result(room), ByHead(*mixed.stride()[:3])
        runtime.start("levit_task_attention", call, keys.device)
        return mixed

    def join(self, mixed: torch.Tensor) -> torch.Tensor:
        """What `mix` returned -> the heads' outputs side by side, `[b*T,D]`."""
        if self.folded:
            mixed = torch.bmm(mixed.flatten(1, 2), self.wv.transpose(1, 2)).unflatten(1, mixed.shape[1:3])
        return mixed.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)

    def attend_backward(self, keys: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        """grad `[H,b,T,C]` of `mix` -> attention `[b,H,T,N]`, gradient of the scores `[H,T,b,N]`, and the same of the
        tokens with themselves, `[H,T,b]` in float32; gradients of scores before they were scaled."""
        runtime, (heads, tokens, _), (images, length) = current(), self.query.shape, keys.shape[:2]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        results = [keys.new_empty(images, heads, tokens, length), keys.new_empty(heads, tokens, images, length)]
        results += [keys.new_empty(heads, tokens, images, dtype=torch.float32) for _ in range(2)]
        own_scores = self._own_scores()
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


def tokens_for(
    patches: torch.Tensor,
    tokens: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    num_heads: int,
    scale: float | None,
) -> Tokens:
    """What one call asks of all its images."""
    depth = tokens.shape[1] // num_heads
    scale = depth**-0.5 if scale is None else scale
    query = _by_head(matmul(tokens, wq.t()), num_heads)
    heads_of = [w.unflatten(0, (num_heads, depth)) for w in (wk, wv)]
    if not folds(num_heads, len(tokens), depth, patches.shape[1]):
        key, value = (_by_head(matmul(tokens, w.t()), num_heads) for w in (wk, wv))
        return Tokens(False, query, query, key, value, *heads_of, scale)
    own = tokens.contiguous().expand(num_heads, -1, -1)
    return Tokens(True, query, torch.bmm(query, heads_of[0]), own, own, *heads_of, scale)


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
    asked = tokens_for(patches, tokens, wq, wk, wv, num_heads, scale)
    heads = [asked.join(asked.mix(*asked.keys_and_values(patches[part]))) for part in asked.parts(patches)]
    rows = heads[0] if len(heads) == 1 else torch.cat(heads)
    return matmul(rows, wo.t(), bo).view(len(patches), *tokens.shape)


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


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[T,D]` -> `[H,T,d]`, dense."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1).contiguous()
