"""The published sizes at which `bench.gpu` checks and times the ops, with their arguments on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench import task_cases, work
from bench.gpu_cases import GpuCase
from levit import LEViTConfig

CFG = LEViTConfig.preset("split-mnist")
PIXELS = CFG.channels * CFG.image_size**2


class _Random:
    """Normal numbers on a device, scaled by fan-in."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.options = {"device": device, "dtype": dtype}
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, fan_in: int = 1, **options: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, **(self.options | options)) * fan_in**-0.5


def _attention(experts: int, batch: int, patch_dim: int, device: str, dtype: torch.dtype) -> tuple:
    new, width, heads, depth = _Random(device, dtype), CFG.embed_dim, CFG.num_heads, CFG.head_dim
    return (
        new(batch, CFG.num_patches, patch_dim),
        new(experts, patch_dim, width, fan_in=patch_dim),
        new(experts, width),
        new(experts, width, 3, heads, depth, fan_in=width),
        new(experts, 3, heads, depth),
        torch.softmax(new(experts, dtype=torch.float32), 0),
        0.2,
    )


def _fuse(experts: int, batch: int, slots: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    gates = torch.softmax(new(experts, dtype=torch.float32), 0)
    index = torch.randint(0, slots, (batch,), generator=new.generator, device=device)
    return new(slots, experts, CFG.num_patches, CFG.feature_dim), gates, index


def _codes(experts: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    return new(experts, CFG.memory_size, CFG.latent_dim), new(CFG.memory_size, CFG.latent_dim)


def _layers(new: _Random, experts: int, *sizes: tuple[int, int]) -> list[Tensor]:
    """Weights in the layout of nn.Linear, and biases."""
    return [
        x
        for inputs, outputs in sizes
        for x in (new(experts, outputs, inputs, fan_in=inputs).transpose(1, 2), new(experts, outputs))
    ]


def _encoder(new: _Random, experts: int) -> list[Tensor]:
    return _layers(new, experts, (PIXELS, 200), (200, 200), (200, CFG.latent_dim), (200, CFG.latent_dim))


def _images(experts: int, device: str, dtype: torch.dtype) -> tuple:
    new, size = _Random(device, dtype), CFG.memory_size
    noise = new(experts, size, CFG.latent_dim)
    return new(size, PIXELS), _encoder(new, experts), new(size, CFG.latent_dim), noise


def _routing(experts: int, batch: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    decoder = _layers(new, experts, (CFG.latent_dim, 200), (200, 200), (200, PIXELS))
    return new(batch, PIXELS), _encoder(new, experts), decoder, CFG.beta, None


def _vae_training(batch: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    decoder = _layers(new, 1, (CFG.latent_dim, 200), (200, 200), (200, PIXELS))
    weights = [x[0].mT if x.dim() == 3 else x[0] for x in (*_encoder(new, 1), *decoder)]
    return new(batch, PIXELS), weights, CFG.beta, new(batch, CFG.latent_dim)


def _head_training(batch: int, device: str, dtype: torch.dtype) -> tuple:
    new, weights = _Random(device, dtype), []
    sizes = [CFG.num_patches * CFG.feature_dim, *CFG.head_hidden, CFG.num_classes]
    for inputs, outputs in itertools.pairwise(sizes):
        weights += [new(outputs, inputs, fan_in=inputs), 1 + new(outputs) / 8, new(outputs)]
    del weights[-2]  # the last layer has a bias alone
    labels = torch.randint(0, CFG.num_classes, (batch,), generator=new.generator, device=device)
    return new(batch, sizes[0]), labels, weights, 0.2, 1e-5


def _tasks(tokens: int, batch: int, device: str, dtype: torch.dtype) -> tuple:
    new, width = _Random(device, dtype), task_cases.WIDTH
    weights = [new(width, width, fan_in=width) for _ in range(4)]
    return new(tokens, width), new(batch, task_cases.PATCHES, width), *weights, new(width), task_cases.HEADS, None


def _task_case(tokens: int, batch: int) -> GpuCase:
    needed = task_cases.attention_work(tokens, batch)
    return GpuCase(
        "task_attention", f"cifar T={tokens} B={batch}", partial(_tasks, tokens, batch), needed.flops, needed.bytes / 4
    )


def _training_case(
    op: str, batch: int, make: Callable[[int, str, torch.dtype], tuple], weights: int, constant: tuple[int, ...] = ()
) -> GpuCase:
    """All weights are read, and all their gradients written."""
    flops = 2 * (1 + work.BACKWARD) * batch * weights
    return GpuCase(op, f"mnist B={batch}, with gradients", partial(make, batch), flops, 2 * weights, constant)


def cases(experts: int = 32, batch: int = 64) -> list[GpuCase]:
    """Most important first."""
    store = batch * (experts - 1) * CFG.num_patches * CFG.feature_dim
    codes = experts * CFG.memory_size * CFG.latent_dim
    per_image, weights = work.attention_flops(CFG), work.attention_weights(CFG)
    found = [
        GpuCase(
            "expert_attention",
            f"mnist K={experts} B={batch}",
            partial(_attention, experts, batch, CFG.patch_dim),
            experts * batch * per_image,
            experts * weights,
        ),
        GpuCase("dkf_fuse", f"K={experts - 1} B={batch}", partial(_fuse, experts - 1, batch, 2000), 2 * store, store),
        GpuCase("latent_distance", f"K={experts} M=2000", partial(_codes, experts), 3 * codes, codes),
        GpuCase(
            "elbo_loss",
            f"K={experts} B=256",
            partial(_routing, experts, 256),
            2 * experts * 256 * work.vae_weights(CFG),
            experts * work.vae_weights(CFG),
        ),
        GpuCase(
            "expansion_distances",
            f"K={experts} M=2000",
            partial(_images, experts),
            2 * experts * CFG.memory_size * work.encoder_weights(CFG),
            experts * work.encoder_weights(CFG),
        ),
        *(_task_case(tokens, 2 * batch) for tokens in (50, 5)),  # over projected patches, and folded
        _training_case("vae_training_loss", batch, _vae_training, work.vae_weights(CFG), constant=(0, 3)),
        _training_case("head_training_loss", batch, _head_training, work.head_weights(CFG)),
    ]
    cifar = per_image + 2 * CFG.num_patches * (192 - CFG.patch_dim) * CFG.embed_dim
    return [
        *found,
        GpuCase(
            "expert_attention",
            f"cifar K={experts} B=256",
            partial(_attention, experts, 256, 192),
            experts * 256 * cifar,
            experts * weights,
        ),
    ]
