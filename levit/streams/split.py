"""The split scenario: groups of classes one after another, in one pass, with the change points hidden."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from levit.config import LEViTConfig
from levit.streams.datasets import Dataset


class SplitStream:
    """A data set's training images as a stream of (images, labels) batches, its classes split into experiences.

    Batches are cut over the whole stream, so one may straddle a change: iterating gives nothing that tells where an
    experience ends. What does (`ends`, `change_points`, `experiences`, `indices`) is for the evaluator alone.

    Args:
        data: the data set.
        classes_per_task: classes per experience; must divide the number of classes.
        batch_size: b; the last batch may be smaller.
        seed: shuffles the images within each experience, chooses those that `limit` keeps, and orders the classes
            where `class_order` is "shuffled".
        class_order: "natural", "shuffled", or the classes in their order.
        limit: keep this many images, of each experience in proportion; None keeps all.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        classes_per_task: int = 2,
        batch_size: int = 10,
        seed: int = 0,
        class_order: str | Sequence[int] = "natural",
        limit: int | None = None,
    ) -> None:
        classes = data.num_classes
        if classes % classes_per_task:
            raise ValueError(f"classes_per_task: expected a divisor of {classes} classes, got {classes_per_task}")
        self.data = data
        self.batch_size = batch_size
        # RandomState alone promises the same numbers in every version of numpy.
        random = np.random.RandomState(seed)
        self.class_order = _order(class_order, classes, random)
        """Every class once, in the order of the stream."""
        self.experiences = [
            tuple(self.class_order[i : i + classes_per_task]) for i in range(0, classes, classes_per_task)
        ]
        """The classes of each experience."""
        parts = [random.permutation(np.flatnonzero(np.isin(data.train_labels, group))) for group in self.experiences]
        if limit is not None:
            parts = [part[:size] for part, size in zip(parts, _shares([len(p) for p in parts], limit), strict=True)]
        self.indices = np.concatenate(parts)
        """[n] each image's row in the data set, in the order of the stream."""
        self.ends = np.cumsum([len(part) for part in parts]).tolist()
        """Position (images seen) at which each experience ends."""

    @classmethod
    def from_config(cls, cfg: LEViTConfig, data: Dataset, limit: int | None = None) -> SplitStream:
        """The stream that a configuration asks for; `ValueError` where the data are not what it expects."""
        expected = dict(channels=cfg.channels, image_size=cfg.image_size, num_classes=cfg.num_classes)
        got = dict(channels=data.image_shape[0], image_size=data.image_shape[1], num_classes=data.num_classes)
        for field, value in got.items():
            if expected[field] != value:
                raise ValueError(f"{field}: the configuration says {expected[field]}, data set {data.name} has {value}")
        return cls(
            data,
            classes_per_task=cfg.classes_per_task,
            batch_size=cfg.batch_size,
            seed=cfg.seed,
            class_order=cfg.class_order,
            limit=limit,
        )

    def __len__(self) -> int:
        """Images in the stream."""
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [b, C, S, S] float32 in [0, 1], labels [b] int64), from image `start` of the stream on."""
        for first in range(start, len(self), self.batch_size):
            rows = self.indices[first : first + self.batch_size]
            yield self.data.to_float(self.data.train_images[rows]), torch.from_numpy(self.data.train_labels[rows])

    @property
    def change_points(self) -> list[int]:
        """Positions of the first image of each experience but the first."""
        return self.ends[:-1]

    def experience_of(self, labels: np.ndarray) -> np.ndarray:
        """The 0-based experience that each label belongs to: [n] → [n]."""
        table = np.empty(len(self.class_order), dtype=np.int64)
        for experience, group in enumerate(self.experiences):
            table[list(group)] = experience
        return table[labels]

    def checksum(self) -> str:
        """sha256 of the order of the images: two streams of one data set are equal where this is."""
        return hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()


def _order(class_order: str | Sequence[int], classes: int, random: np.random.RandomState) -> list[int]:
    if class_order == "natural":
        return list(range(classes))
    if class_order == "shuffled":
        return random.permutation(classes).tolist()
    if isinstance(class_order, str) or sorted(class_order) != list(range(classes)):
        raise ValueError(f"class_order: expected natural, shuffled or every class once, got {class_order!r}")
    return [int(label) for label in class_order]


def _shares(sizes: list[int], limit: int) -> list[int]:
    """`limit` images over parts of these sizes in proportion, at least one each; largest remainders are rounded up."""
    if limit < len(sizes):
        raise ValueError(f"limit: expected at least {len(sizes)} images, one per experience, got {limit}")
    total = sum(sizes)
    if limit >= total:
        return sizes
    exact = [limit * size / total for size in sizes]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) > limit:  # the smallest were lifted to one image, at the largest's cost
        shares[shares.index(max(shares))] -= 1
    by_remainder = sorted(range(len(sizes)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: limit - sum(shares)]:
        shares[i] += 1
    return shares
