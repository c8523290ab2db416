"""What K experts of a configuration cost on this machine: parameters, bytes, seconds; measured on noise, not data."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from levit.config import LEViTConfig
from levit.learner import Learner
from levit.model import LEViT

NEVER = 1e30
"""A threshold that no memory is beyond: the number of experts stays as it is."""


def estimate(cfg: LEViTConfig, experts: int, device: str = "cpu", seconds: float = 3.0) -> dict[str, Any]:
    """Build a model of `experts` with a full memory, and time what a stream would make it do.

    Args:
        cfg: the configuration; its expansion rule is computed at every batch, as it would be, but never fires.
        experts: K, the active one included.
        device: where to compute.
        seconds: how long to measure; at least one batch is, after a first one that warms up.

    Returns:
        `parameters` of all K experts, `model_bytes` of parameters and buffers, `memory_bytes` of the images in memory,
        `cache_bytes` of what is stored beside them, `cache_stores_features` (whether they fit the budget),
        `seconds_per_thousand_images` of learning and `prediction_seconds_per_thousand_images`, medians over batches of
        the stream's size.
    """
    if experts < 1:
        raise ValueError(f"experts: expected at least 1, got {experts}")
    threshold = dict(gamma=NEVER) if cfg.criterion == "latent" else dict(energy_threshold=NEVER)
    cfg = dataclasses.replace(cfg, max_experts=None if experts > 1 else 1, **threshold)
    model = LEViT(cfg).to(device)
    for _ in range(experts - 1):
        model.add_expert()
    learner = Learner(model)
    _fill(learner)
    images = _noise(learner, cfg.batch_size)
    labels = torch.arange(cfg.batch_size, device=device) % cfg.num_classes
    learning = _median_seconds(lambda: learner.observe(images, labels), seconds, device)
    with torch.no_grad():
        prediction = _median_seconds(lambda: model(images), seconds / 3, device)
    features = getattr(learner.cache, "features", None)
    return {
        "experts": experts,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_bytes": _bytes([*model.parameters(), *model.buffers()]),
        "memory_bytes": _bytes([learner.memory.images]),
        "cache_bytes": _bytes(value for value in vars(learner.cache).values() if isinstance(value, Tensor)),
        "cache_stores_features": features is not None,
        "seconds_per_thousand_images": 1000 * learning / cfg.batch_size,
        "prediction_seconds_per_thousand_images": 1000 * prediction / cfg.batch_size,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def _fill(learner: Learner) -> None:
    """A full memory, without asking the frozen experts about it: the time does not depend on what they say."""
    capacity = learner.memory.capacity
    learner.memory.add(_noise(learner, capacity), torch.arange(capacity, device=learner.memory.labels.device) % 2)
    for value in vars(learner.cache).values():
        if isinstance(value, Tensor):
            value.zero_()


def _noise(learner: Learner, count: int) -> Tensor:
    like = learner.memory.images
    return torch.rand(count, *like.shape[1:], dtype=like.dtype, device=like.device)


def _median_seconds(work: Callable[[], object], seconds: float, device: str) -> float:
    """Of one call, after a first one that is not counted."""
    taken: list[float] = []
    work()
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
