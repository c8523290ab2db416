"""The calls whose kernels the static checks compile: every op at published sizes, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Ops = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """An op, the name of a size, and what runs it on a backend's ops for a dtype."""

    op: str
    size: str
    run: Callable[[Ops, torch.dtype], object]


def _new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _dkf_fuse(gate_shape: tuple[int, ...]) -> Callable[[Ops, torch.dtype], object]:
    """A minibatch of 64 out of a memory of 2000, 31 frozen experts, split-mnist."""

    def run(ops: Ops, dtype: torch.dtype) -> None:
        features, index = _new(dtype, 2000, 31, 16, 300), _new(torch.int64, 64)
        gates = _new(torch.float32, *gate_shape)
        out = ops["dkf_fuse"](features, gates, index)
        ops["dkf_fuse_backward"](out, features, gates, index, [True, True])

    return run


def _attention_arguments(dtype: torch.dtype, batch: int, experts: int, pixels: int, gated: bool) -> tuple:
    return (
        _new(dtype, batch, 16, pixels),
        _new(dtype, experts, pixels, 100),
        _new(dtype, experts, 100),
        _new(dtype, experts, 100, 3, 3, 100),
        _new(dtype, experts, 3, 3, 100),
        _new(torch.float32, experts) if gated else None,
        0.2,
    )


def _expert_attention(*sizes: int | bool) -> Callable[[Ops, torch.dtype], object]:
    return lambda ops, dtype: ops["expert_attention"](*_attention_arguments(dtype, *sizes))


def _expert_attention_backward(*sizes: int | bool) -> Callable[[Ops, torch.dtype], object]:
    def run(ops: Ops, dtype: torch.dtype) -> None:
        args = _attention_arguments(dtype, *sizes)
        grad = _new(torch.float32, args[0].shape[0], 16, 300)
        ops["expert_attention_backward"](grad, *args, [], [False] + [True] * 5)

    return run


def _encoder(dtype: torch.dtype, experts: int) -> list[torch.Tensor]:
    """Of split-mnist, in the layout of nn.Linear."""
    shapes = [(784, 200), (200, 200), (200, 50), (200, 50)]
    return [x for n, m in shapes for x in (_new(dtype, experts, m, n).transpose(1, 2), _new(dtype, experts, m))]


def _decoder(dtype: torch.dtype, experts: int) -> list[torch.Tensor]:
    shapes = [(50, 200), (200, 200), (200, 784)]
    return [x for n, m in shapes for x in (_new(dtype, experts, m, n).transpose(1, 2), _new(dtype, experts, m))]


def _latent_distance(ops: Ops, dtype: torch.dtype) -> None:
    codes, query = _new(dtype, 31, 2000, 50), _new(dtype, 2000, 50)
    ops["latent_distance_backward"](ops["latent_distance"](codes, query), codes, query, [True, True])


def _expansion_distances(ops: Ops, dtype: torch.dtype) -> None:
    args = (_new(dtype, 2000, 784), _encoder(dtype, 31), _new(dtype, 2000, 50), _new(dtype, 31, 2000, 50))
    out = ops["expansion_distances"](*args)
    ops["expansion_distances_backward"](out, *args, [True] * 11)


def _elbo_loss(ops: Ops, dtype: torch.dtype) -> None:
    args = (_new(dtype, 256, 784), _encoder(dtype, 32), _decoder(dtype, 32), 0.5, _new(dtype, 10, 50))
    out = ops["elbo_loss"](*args)
    ops["elbo_loss_backward"](out, *args, [True] * 16)


def _vae_codes(ops: Ops, dtype: torch.dtype) -> None:
    ops["vae_codes"](_new(dtype, 10, 784), _encoder(dtype, 31), _new(dtype, 31, 10, 50))


def _vae_training_loss(ops: Ops, dtype: torch.dtype) -> None:
    layers = [*_encoder(dtype, 1), *_decoder(dtype, 1)]
    weights = [x[0].t() if x.dim() == 3 else x[0] for x in layers]
    ops["vae_training_loss"](_new(dtype, 64, 784), weights, 0.5, _new(dtype, 64, 50))


def _head_training_loss(inputs: int, *sizes: int) -> Callable[[Ops, torch.dtype], object]:
    """Hidden sizes, then classes."""

    def run(ops: Ops, dtype: torch.dtype) -> None:
        weights, width = [], inputs
        for size in sizes:
            weights += [_new(dtype, size, width), _new(dtype, size), _new(dtype, size)]
            width = size
        features, labels = _new(dtype, 64, inputs), _new(torch.int64, 64)
        ops["head_training_loss"](features, labels, weights[:-1], 0.2, 1e-5)

    return run


def _batch_norm_fold(pixels: int) -> Callable[[Ops, torch.dtype], object]:
    def run(ops: Ops, dtype: torch.dtype) -> None:
        weight, rows = _new(dtype, 100, pixels), [_new(dtype, 100) for _ in range(5)]
        running = (*rows[3:], _new(torch.int64))
        w, b, *kept = ops["batch_norm_fold"](_new(dtype, 1024, pixels), weight, *rows[:3], running, 0.1, 1e-5)
        ops["batch_norm_fold_backward"](w, b, weight, rows[0], *kept)

    return run


def _position_noise(ops: Ops, dtype: torch.dtype) -> None:
    ops["position_noise"](_new(torch.int64, 10), _new(torch.int64, 31), 50, 0, dtype)


def _task_attention(batch: int, tokens: int, length: int) -> Callable[[Ops, torch.dtype], object]:
    """The presets of DyTox, 12 heads of 32 columns."""

    def run(ops: Ops, dtype: torch.dtype) -> None:
        weights = [_new(dtype, 384, 384) for _ in range(4)]
        args = (_new(dtype, tokens, 384), _new(dtype, batch, length, 384), *weights, _new(dtype, 384), 12, None)
        out = ops["task_attention"](*args)
        ops["task_attention_backward"](out, *args, [True] * 7)

    return run


CALLS = [
    Call("expert_attention", "cifar K=32 B=256, gated", _expert_attention(256, 32, 192, True)),
    Call("expert_attention", "mnist K=32 B=64, gated", _expert_attention(64, 32, 49, True)),
    Call("expert_attention", "mnist K=31 B=10, all K", _expert_attention(10, 31, 49, False)),
    Call("expert_attention_backward", "mnist K=1 B=64, gated", _expert_attention_backward(64, 1, 49, True)),
    Call("dkf_fuse", "mnist K=31 B=64", _dkf_fuse((31,))),
    Call("dkf_fuse", "mnist K=31 B=64, per head", _dkf_fuse((31, 3))),
    Call("latent_distance", "mnist K=31 M=2000", _latent_distance),
    Call("expansion_distances", "mnist K=31 M=2000", _expansion_distances),
    Call("elbo_loss", "mnist K=32 B=256 S=10", _elbo_loss),
    Call("vae_codes", "mnist K=31 B=10", _vae_codes),
    Call("vae_training_loss", "mnist B=64", _vae_training_loss),
    Call("head_training_loss", "mnist B=64", _head_training_loss(4800, 100, 10)),
    Call("head_training_loss", "cifar B=64", _head_training_loss(4800, 500, 200, 10)),
    Call("batch_norm_fold", "mnist B=64", _batch_norm_fold(49)),
    Call("batch_norm_fold", "cifar B=64", _batch_norm_fold(192)),
    Call("position_noise", "mnist K=31 B=10", _position_noise),
    Call("task_attention", "cifar T=50", _task_attention(128, 50, 64)),
    Call("task_attention", "cifar T=10, folded", _task_attention(128, 10, 64)),
    Call("task_attention", "imagenet T=50", _task_attention(128, 50, 196)),
    Call("task_attention", "imagenet T=10, folded", _task_attention(128, 10, 196)),
]
