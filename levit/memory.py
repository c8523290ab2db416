"""The memory of Algorithm 1: a ring of the newest images, at a constant cost per image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from levit.transfer import to_device


class Memory:
    """The newest images of the stream with their labels, at most `capacity`; oldest rows leave first.

    Rows live in *slots* 0..capacity-1 of preallocated tensors and never move, so that whatever is stored beside a row
    (see `levit.cache`) can be addressed by its slot.

    Args:
        capacity: M, images.
        image_shape: (C, S, S).
        like: a tensor whose dtype and device the images take.
    """

    def __init__(self, capacity: int, image_shape: tuple[int, ...], like: Tensor) -> None:
        self.capacity = capacity
        self.images = like.new_zeros(capacity, *image_shape)
        self.labels = torch.zeros(capacity, dtype=torch.int64, device=like.device)
        self.positions = torch.zeros_like(self.labels)
        """Position in the stream of each slot's image."""
        self.arrivals = torch.zeros(2, capacity, dtype=torch.int64)
        """Of each slot: where in the stream the batch it came with began, and how many images that batch had."""
        self.seen = 0
        """Images added so far, over the whole stream."""
        self._oldest = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def full(self) -> bool:
        """Whether the next image pushes the oldest one out."""
        return self._size == self.capacity

    def add(self, images: Tensor, labels: Tensor) -> slice | Tensor:
        """Store a batch, images [b, C, S, S] and labels [b] with b ≤ capacity.

        Returns:
            The slots taken: a slice where they follow each other, else [b] int64.
        """
        count = len(images)
        self.drop_oldest(max(0, self._size + count - self.capacity))
        slots = self._slots(self._size, count)
        self.images[slots] = images
        self.labels[slots] = labels
        self.positions[slots] = torch.arange(self.seen, self.seen + count, device=self.positions.device)
        on_host = self._slots_on_host(self._size, count)
        self.arrivals[0, on_host] = self.seen
        self.arrivals[1, on_host] = count
        self._size += count
        self.seen += count
        return slots

    def drop_oldest(self, count: int) -> None:
        """Forget the `count` oldest rows (all of them, if there are fewer)."""
        count = min(count, self._size)
        self._oldest = (self._oldest + count) % self.capacity
        self._size -= count

    def clear(self) -> None:
        """Forget every row."""
        self.drop_oldest(self._size)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Slots of `count` rows drawn uniformly with replacement, [count]."""
        ranks = torch.randint(self._size, (count,), generator=generator)
        return to_device((ranks + self._oldest) % self.capacity, self.labels.device)

    def live(self) -> slice | Tensor:
        """An index of every row: all slots as a slice when full (no copy then), else slots, oldest first."""
        return slice(None) if self.full else self._slots(0, self._size)

    def state_dict(self) -> dict[str, Any]:
        """The rows, oldest first, and where the ring stands; tensors and integers only."""
        slots = self._slots(0, self._size)
        rows = {name: getattr(self, name)[slots].clone() for name in ("images", "labels", "positions")}
        arrivals = self.arrivals[:, self._slots_on_host(0, self._size)].clone()
        return rows | {"arrivals": arrivals, "oldest": self._oldest, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put saved rows back into the slots they had; one that does not fit raises `ValueError`, nothing changes."""
        count = len(state["labels"])
        shapes = {
            "images": (count, *self.images.shape[1:]),
            "labels": (count,),
            "positions": (count,),
            "arrivals": (2, count),
        }
        for name, shape in shapes.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(f"memory.{name}: expected {list(shape)}, got {list(state[name].shape)}")
        if count > self.capacity or not 0 <= state["oldest"] < self.capacity:
            raise ValueError(f"memory: expected at most {self.capacity} rows, got {count} from slot {state['oldest']}")
        self._oldest, self._size, self.seen = state["oldest"], count, state["seen"]
        slots = self._slots(0, count)
        for name in ("images", "labels", "positions"):
            getattr(self, name)[slots] = state[name].to(getattr(self, name))
        self.arrivals[:, self._slots_on_host(0, count)] = state["arrivals"]

    def _slots(self, rank: int, count: int) -> slice | Tensor:
        """Slots of `count` consecutive ranks (0 is the oldest), for an index into what lies on the images' device."""
        slots = self._slots_on_host(rank, count)
        return slots if isinstance(slots, slice) else to_device(slots, self.labels.device)

    def _slots_on_host(self, rank: int, count: int) -> slice | Tensor:
        first = (self._oldest + rank) % self.capacity
        if first + count <= self.capacity:
            return slice(first, first + count)
        return torch.arange(first, first + count) % self.capacity
