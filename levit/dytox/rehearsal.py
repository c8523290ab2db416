"""Rehearsal: a memory with one limit over all classes together, and which images of a class enter it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def herding(embeddings: Tensor, count: int) -> Tensor:
    """Rows whose running mean follows the mean of all, greedily (iCaRL's herding): [n, E] → [min(count, n)] int64.

    Rows are taken at length 1. Row k of the result is the one not yet chosen that brings the mean of the first k
    nearest to that of all; so a shorter memory keeps the first ones.
    """
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    mean, total, chosen = unit.mean(0), torch.zeros_like(unit.sum(0)), []
    left = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    for k in range(1, min(count, len(unit)) + 1):
        distance = torch.linalg.vector_norm(mean - (total + unit) / k, dim=1)
        row = int(torch.where(left, distance, torch.inf).argmin())
        left[row] = False
        total += unit[row]
        chosen.append(row)
    return torch.tensor(chosen, dtype=torch.int64, device=unit.device)


class Rehearsal:
    """Images of all classes seen, at most `capacity` together, equally many of each class.

    Args:
        capacity: images; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.classes: list[Tensor] = []
        """Of each class its images [k, C, S, S], the most important first."""

    def __len__(self) -> int:
        return sum(len(images) for images in self.classes)

    def per_class(self, classes: int) -> int:
        """Images of each class where there are so many."""
        return self.capacity // classes

    def add(self, chosen: list[Tensor]) -> None:
        """New classes in their order, each with its images by importance; every class is cut to its equal share."""
        self.classes += chosen
        most = self.per_class(len(self.classes))
        self.classes = [images[:most].clone() for images in self.classes]

    def all(self) -> tuple[Tensor, Tensor]:
        """images [m, C, S, S], labels [m]; at least one class must have been added."""
        labels = [torch.full((len(images),), c, dtype=torch.int64) for c, images in enumerate(self.classes)]
        return torch.cat(self.classes), torch.cat(labels)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types."""
        return {"capacity": self.capacity, "classes": list(self.classes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if state["capacity"] != self.capacity:
            raise ValueError(f"memory: expected a capacity of {self.capacity} images, got {state['capacity']}")
        self.classes = list(state["classes"])


class Reservoir(Rehearsal):
    """A rehearsal memory that images enter as they come: of each class a sample of all that came, each as likely."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.came: list[int] = []
        """Images of each class so far."""

    def offer(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> None:
        """Images [n, C, S, S] of classes [n]; a new class has the next number, and every other one makes room."""
        if not self.capacity or not len(images):
            return
        new = int(labels.max()) + 1 - len(self.classes)
        if new > 0:
            self.add([images[:0]] * new)
            self.came += [0] * new
        most = self.per_class(len(self.classes))
        for c in labels.unique().tolist():
            own = images[labels == c]
            room = max(0, most - len(self.classes[c]))
            self.classes[c] = torch.cat([self.classes[c], own[:room]])
            self.came[c] += min(room, len(own))
            for image in own[room:]:
                self.came[c] += 1
                if (place := int(torch.randint(self.came[c], (), generator=generator))) < most:
                    self.classes[c][place] = image

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images [count, C, S, S] and labels [count] with replacement, each class as likely; it must hold an image."""
        filled = [c for c, own in enumerate(self.classes) if len(own)]
        sizes = torch.bincount(torch.randint(len(filled), (count,), generator=generator), minlength=len(filled))
        images = []
        for c, size in zip(filled, sizes.tolist(), strict=True):
            own = self.classes[c]
            images.append(own[torch.randint(len(own), (size,), generator=generator).to(own.device)])
        labels = torch.repeat_interleave(torch.tensor(filled), sizes)
        return torch.cat(images), labels.to(images[0].device)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types."""
        return super().state_dict() | {"came": list(self.came)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self.came = list(state["came"])
