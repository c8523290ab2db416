"""Stream: batches of images and labels for the learner; everything else about them for the evaluator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from levit.config import LEViTConfig
from levit.streams import scenarios
from levit.streams.dataset import Dataset
from levit.streams.scenarios import Plan

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Images [b, C, S, S] in [0, 1] and a generator of its randomness → as many, of the same shape and range."""

Normalize = Callable[[Tensor], Tensor]
"""Images [b, C, S, S] in [0, 1] → the same shape and range."""


@dataclass(frozen=True)
class Images:
    """Images of a data set in some order, as tensors: what a model sees. Indexing takes rows, [B] or a slice."""

    data: Dataset
    pixels: np.ndarray
    """[n, C, S, S] uint8: those of the training or of the test set."""
    rows: np.ndarray
    """[m] which of them, in order."""
    order: np.ndarray | None = None
    """[m] whose row of `permutations` each image is shown under."""
    permutations: np.ndarray | None = None
    normalize: Normalize | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | np.ndarray) -> Tensor:
        """[B, C, S, S] float32 in [0, 1]."""
        return self.normalized(self.plain(index))

    def plain(self, index: slice | np.ndarray) -> Tensor:
        """The same before normalisation."""
        images = self.pixels[self.rows[index]]
        if self.permutations is not None:
            moved = self.permutations[self.order[index]]
            images = np.take_along_axis(images.reshape(*images.shape[:2], -1), moved[:, None], 2).reshape(images.shape)
        return self.data.to_float(images)

    def normalized(self, images: Tensor) -> Tensor:
        """The hook's answer, checked."""
        if self.normalize is None:
            return images
        return checked_hook(
            "normalize",
            images,
            self.normalize(images),
            " The VAE's squared errors and the published thresholds are those of pixels in [0, 1], and batch norm "
            "standardises the tokens anyway: subtracting a mean and dividing by a deviation gains nothing",
        )


@dataclass(frozen=True)
class TestSet:
    """The test images of a stream, and whose they are."""

    images: Images
    labels: np.ndarray
    """[m] int64: what the model should say."""
    experience: np.ndarray
    """[m] the 0-based experience that each belongs to."""
    kinds: np.ndarray
    """[m] which kind of image each is, see `Stream.kinds`."""

    __test__ = False  # pytest takes the name for its own

    def __len__(self) -> int:
        return len(self.images)

    def of_experience(self, j: int) -> TestSet:
        """Those of experience j alone."""
        here = np.flatnonzero(self.experience == j)
        images = self.images
        order = None if images.order is None else images.order[here]
        part = Images(images.data, images.pixels, images.rows[here], order, images.permutations, images.normalize)
        return TestSet(part, self.labels[here], self.experience[here], self.kinds[here])


class Stream:
    """A data set's training images in the order of a plan, as (images, labels) batches.

    Batches are cut over the whole stream, so one may straddle a change: iterating gives nothing that tells where an
    experience ends. All attributes are for the evaluator alone.

    Args:
        data: the data set.
        plan: which images in which order (`levit.streams.scenarios`).
        batch_size: b; the last batch may be smaller.
        labels: [num_classes] the label that the learner is told for each class; None takes the class itself.
        augment: changes training images, batch by batch. Its generator is seeded by the batch's position, so a run
            that was stopped goes on with the same images.
        normalize: changes training and test images, the former after `augment`. The result must stay in [0, 1].
        seed: of the augmentation.
    """

    def __init__(
        self,
        data: Dataset,
        plan: Plan,
        *,
        batch_size: int = 10,
        labels: np.ndarray | None = None,
        augment: Augment | None = None,
        normalize: Normalize | None = None,
        seed: int = 0,
    ) -> None:
        labels = np.arange(data.num_classes) if labels is None else labels
        self.data = data
        self.plan = plan
        self.batch_size = batch_size
        self.augment, self.normalize, self.seed = augment, normalize, seed
        self.ends = plan.ends
        """Position (images seen) at which each experience ends."""
        self.classes = data.train_labels[plan.rows]
        """[n] class of each image in the data set; its name and label there are `data.origins[class]`."""
        self.label_of_class = labels
        """[num_classes] what the learner is told for each class of the data set."""
        self.labels = labels[self.classes]
        """[n] what the learner is told."""
        tested = data.test_labels[plan.test_rows]
        kinds, test_kinds = self.classes, tested
        if plan.permutations is not None:
            kinds = kinds + data.num_classes * plan.experience
            test_kinds = test_kinds + data.num_classes * plan.test_experience
        self.kinds = kinds
        """[n] what an expert can have seen: the class of each image, or the class under one of the permutations."""
        self.num_kinds = data.num_classes * (1 if plan.permutations is None else len(plan.permutations))
        shown = plan.permutations, normalize
        self.images = Images(data, data.train_images, plan.rows, plan.experience, *shown)
        test_images = Images(data, data.test_images, plan.test_rows, plan.test_experience, *shown)
        self.test = TestSet(test_images, labels[tested], plan.test_experience, test_kinds)

    @classmethod
    def from_config(
        cls,
        cfg: LEViTConfig,
        data: Dataset,
        limit: int | None = None,
        test_limit: int | None = None,
        augment: Augment | None = None,
        normalize: Normalize | None = None,
    ) -> Stream:
        """The stream that a configuration asks for; `ValueError` where the data are not what it expects."""
        shared = cfg.scenario == "joined" and cfg.shared_labels
        labels = np.concatenate([np.arange(size) for size in data.part_sizes]) if shared else None
        got = dict(
            channels=data.image_shape[0],
            image_size=data.image_shape[1],
            num_classes=max(data.part_sizes) if shared else data.num_classes,
        )
        for field, value in got.items():
            if getattr(cfg, field) != value:
                raise ValueError(
                    f"{field}: the configuration says {getattr(cfg, field)}, data set {data.name} has {value}; "
                    f"pass --{field.replace('_', '-')} {value}"
                )
        random = np.random.RandomState(cfg.seed)
        groups = cfg.classes_per_task, cfg.class_order
        if cfg.scenario == "permuted":
            plan = scenarios.permuted(data, random, cfg.permutations, limit)
        elif cfg.scenario == "shuffled":
            plan = scenarios.shuffled(data, random, limit)
        elif cfg.scenario == "drifting":
            plan = scenarios.drifting(data, random, *groups, cfg.drift, limit)
        else:
            plan = scenarios.split(data, random, *groups, limit)
        plan = scenarios.limited_tests(plan, np.random.RandomState(cfg.seed), test_limit)
        return cls(
            data, plan, batch_size=cfg.batch_size, labels=labels, augment=augment, normalize=normalize, seed=cfg.seed
        )

    def __len__(self) -> int:
        """Images in the stream."""
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [b, C, S, S] float32 in [0, 1], labels [b] int64), from image `start` of the stream on."""
        for first in range(start, len(self), self.batch_size):
            part = slice(first, first + self.batch_size)
            images = self.images.plain(part)
            if self.augment is not None:
                seed = int(np.random.SeedSequence((self.seed, first)).generate_state(1)[0])
                generator = torch.Generator().manual_seed(seed)
                images = checked_hook("augment", images, self.augment(images.clone(), generator))
            yield self.images.normalized(images), torch.from_numpy(self.labels[part])

    @property
    def experiences(self) -> list[tuple[int, ...]]:
        """The classes of each experience."""
        return self.plan.experiences

    @property
    def change_points(self) -> list[int]:
        """Positions of the first image of each experience but the first."""
        return self.ends[:-1]

    def checksum(self) -> str:
        """sha256 of what comes when: two streams of one data set are equal where this is."""
        digest = hashlib.sha256(self.plan.rows.astype("<i8").tobytes())
        if self.plan.permutations is not None:
            digest.update(self.plan.permutations.astype("<i8").tobytes())
        return digest.hexdigest()

    def record(self) -> dict[str, np.ndarray]:
        """What the stream showed, image by image [n], and what every class was: for the run's record."""
        record = {
            "index": self.plan.rows.astype(np.int32),
            "label": self.labels.astype(np.int32),
            "class": self.classes.astype(np.int32),
            "experience": self.plan.experience.astype(np.int32),
            "class_data_set": np.array([name for name, _ in self.data.origins]),
            "class_original_label": np.array([label for _, label in self.data.origins]),
        }
        if self.plan.permutations is not None:
            record["permutations"] = self.plan.permutations.astype(np.int32)
        return record


def checked_hook(name: str, before: Tensor, after: Tensor, why: str = "") -> Tensor:
    """What a hook made of images; `ValueError` unless it is of the same shape and type, and in [0, 1]."""
    if not isinstance(after, Tensor) or after.shape != before.shape or after.dtype != before.dtype:
        got = f"{after.dtype} {list(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
        raise ValueError(f"{name}: expected {before.dtype} {list(before.shape)}, as it was given, got {got}")
    low, high = (bound.item() for bound in torch.aminmax(after))
    if not (low >= 0 and high <= 1):
        raise ValueError(f"{name}: expected images in [0, 1], got {low:g} to {high:g}.{why}")
    return after
