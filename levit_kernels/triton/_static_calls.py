"""The calls whose kernels the static checks compile: every op at published sizes, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import dkf_fuse, expert_attention
from .launch import Launch, listening

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Call:
    """An op, the name of a size, and what runs it for a dtype."""

    op: str
    size: str
    run: Callable[[torch.dtype], object]


def launches(call: Call, dtype: torch.dtype) -> list[Launch]:
    """The kernels that the call would start."""
    started: list[Launch] = []
    with listening(lambda launch: bool(started.append(launch))):
        call.run(dtype)
    return started


def _new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _dkf_fuse(gate_shape: tuple[int, ...]) -> Callable[[torch.dtype], object]:
    """A minibatch of 64 out of a memory of 2000, 31 frozen experts, split-mnist."""

    def run(dtype: torch.dtype) -> None:
        features, index = _new(dtype, 2000, 31, 16, 300), _new(torch.int64, 64)
        gates = _new(torch.float32, *gate_shape)
        out = dkf_fuse.dkf_fuse(features, gates, index)
        dkf_fuse.dkf_fuse_backward(out, features, gates, index, [True, True])

    return run


def _expert_attention(batch: int, experts: int, pixels: int, gated: bool) -> Callable[[torch.dtype], object]:
    def run(dtype: torch.dtype) -> None:
        expert_attention.expert_attention(
            _new(dtype, batch, 16, pixels),
            _new(dtype, experts, pixels, 100),
            _new(dtype, experts, 100),
            _new(dtype, experts, 100, 3, 3, 100),
            _new(dtype, experts, 3, 3, 100),
            _new(torch.float32, experts) if gated else None,
            0.2,
        )

    return run


CALLS = [
    Call("expert_attention", "cifar K=32 B=256, gated", _expert_attention(256, 32, 192, True)),
    Call("expert_attention", "mnist K=32 B=64, gated", _expert_attention(64, 32, 49, True)),
    Call("expert_attention", "mnist K=31 B=10, all K", _expert_attention(10, 31, 49, False)),
    Call("dkf_fuse", "mnist K=31 B=64", _dkf_fuse((31,))),
    Call("dkf_fuse", "mnist K=31 B=64, per head", _dkf_fuse((31, 3))),
]
