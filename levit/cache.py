"""What the memory keeps beside each image, so that nothing a frozen expert says about it is computed twice.

Frozen means constant: its features and its code for a stored image never change, so they are filled in once, when the
image enters. A cache belongs to one set of frozen experts; the learner makes a new one after each expansion, when the
memory is empty anyway.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from levit_kernels.huge_pages import huge_pages

if TYPE_CHECKING:
    from levit.memory import Memory
    from levit.reference import LEViT


class CachedRows(NamedTuple):
    """Stored features of the images of one minibatch."""

    features: Tensor
    """[M, K-1, N, E], every slot of the memory."""
    index: Tensor
    """[B] int64, the minibatch's slots."""


class MemoryCache:
    """The least that the expansion rule asks for; used by the reference.

    Rule `latent` wants ε of every frozen VAE, drawn when the image enters the memory; the others want nothing.

    Args:
        model: whose frozen experts this is about.
        memory: whose slots this stands beside.
    """

    def __init__(self, model: LEViT, memory: Memory) -> None:
        self.model = model
        self.memory = memory
        self.noise = model.weight.new_zeros(model.num_experts - 1, memory.capacity, model.cfg.latent_dim)

    def fill(self, slots: slice | Tensor) -> None:
        """Take note of the images that just entered the memory at `slots`, as `Memory.add` gives them."""
        self.noise[:, slots] = self.model.frozen_noise(self.memory.positions[slots])

    def refill(self) -> None:
        """Take note of everything the memory holds (after a state was loaded)."""
        if len(self.memory):
            self.fill(_slots(self.memory))

    def rows(self, index: Tensor) -> CachedRows | None:
        """The stored features of a minibatch of slots [B]; None where none are stored."""
        return None

    def statistic(self, generator: torch.Generator) -> Tensor:
        """What the expansion rule looks at, over the whole memory: [K-1], see `levit.expansion`."""
        live = self.memory.live()
        images = self.memory.images[live]
        if self.model.cfg.criterion == "energy":
            return self.model.reconstruction_errors(images).mean(1)
        return self.model.expansion_distances(images, generator, noise=self.noise[:, live])


class KnowledgeCache:
    """Beside every stored image: features [M, K-1, N, E] and what the rule asks of the frozen VAEs.

    That is their codes [K-1, M, L] for rule `latent`, their reconstruction errors [K-1, M] for rule `energy`, and
    nothing for rule `calibrated`, which looks at arriving images only. Features larger than the configuration's budget
    are not kept; the model computes them then, and gets the same numbers. It says so once. Same arguments and methods
    as `MemoryCache`.
    """

    def __init__(self, model: LEViT, memory: Memory) -> None:
        self.model = model
        self.memory = memory
        cfg = model.cfg
        frozen, weight = model.num_experts - 1, model.weight
        self.codes = self.errors = None
        if cfg.criterion == "latent":
            self.codes = weight.new_empty(frozen, memory.capacity, cfg.latent_dim)
            huge_pages(self.codes)
        elif cfg.criterion == "energy":
            self.errors = weight.new_empty(frozen, memory.capacity)
        self.features: Tensor | None = None
        if not frozen or cfg.gating == "none":
            return
        dtype = torch.bfloat16 if "bf16" in (cfg.cache_dtype, cfg.precision) else weight.dtype
        shape = (memory.capacity, frozen, cfg.num_tokens, cfg.feature_dim)
        wanted, budget = math.prod(shape) * dtype.itemsize, cache_budget(cfg.cache, weight.device)
        if wanted <= budget:
            self.features = torch.empty(shape, dtype=dtype, device=weight.device)
            huge_pages(self.features)
        else:
            model.tell_once(
                f"cache: features of {shape[1]} frozen experts for {shape[0]} images take {wanted / 2**20:,.0f} MiB, "
                f"over the budget of {budget / 2**20:,.0f} MiB; they are computed at every step (slower, same numbers)"
            )

    def fill(self, slots: slice | Tensor) -> None:
        """Evaluate the frozen experts on the images that just entered the memory at `slots`, once and for all."""
        self._fill(slots, self.memory.images[slots], self.memory.positions[slots])

    def refill(self) -> None:
        """As if nothing had stopped, to the last bit: images are evaluated in the batches they came in.

        How a matrix product rounds may depend on its number of rows, so a batch that has partly left the memory is
        filled up with blank images.
        """
        slots = _slots(self.memory)
        starts, counts = self.memory.arrivals[:, slots.cpu()]
        for start in starts.unique().tolist():
            arrived = starts == start
            here = slots[arrived.to(slots.device)]
            positions = torch.arange(start, start + int(counts[arrived][0]), device=slots.device)
            images = self.memory.images.new_zeros(len(positions), *self.memory.images.shape[1:])
            rows = self.memory.positions[here] - start
            images[rows] = self.memory.images[here]
            self._fill(here, images, positions, rows)

    def rows(self, index: Tensor) -> CachedRows | None:
        """The stored features of a minibatch of slots [B]; None where none are stored."""
        return None if self.features is None else CachedRows(self.features, index)

    def statistic(self, generator: torch.Generator) -> Tensor:
        """What the expansion rule looks at, over the whole memory: [K-1], see `levit.expansion`."""
        live = self.memory.live()
        if self.errors is not None:
            return self.errors[:, live].mean(1)
        return self.model.expansion_distances(self.memory.images[live], generator, codes=self.codes[:, live])

    def _fill(
        self, slots: slice | Tensor, images: Tensor, positions: Tensor, rows: Tensor | slice = slice(None)
    ) -> None:
        """Evaluate a batch, and keep its `rows` at `slots`."""
        if self.model.num_experts == 1:
            return
        if self.errors is not None:
            self.errors[:, slots] = self.model.reconstruction_errors(images)[:, rows]
        if self.codes is not None:
            self.codes[:, slots] = self.model.frozen_codes(images, self.model.frozen_noise(positions))[:, rows]
        if self.features is None:
            return
        if isinstance(slots, slice):
            self.model.frozen_features(images, out=self.features[slots])  # a new batch: written once, where it stays
        else:
            self.features[slots] = self.model.frozen_features(images)[rows].to(self.features.dtype)


def cache_budget(setting: str | int, device: torch.device) -> int:
    """Bytes that stored features may take: the given number, or for `auto` half of the memory that is free now."""
    if setting != "auto":
        return int(setting)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return free_memory() // 2


def free_memory() -> int:
    """Bytes of main memory that can still be had, as Linux counts them; elsewhere the free pages."""
    try:
        with open("/proc/meminfo") as lines:
            kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return kilobytes * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _slots(memory: Memory) -> Tensor:
    return torch.arange(memory.capacity, device=memory.labels.device)[memory.live()]
