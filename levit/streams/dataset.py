"""Dataset: images and labels in memory, checked; and what joins several of them into one."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """A data set that is missing, damaged or of the wrong kind; the message names it and says how to get it."""


@dataclass(frozen=True)
class Dataset:
    """Images and labels of a data set, train and test.

    Images stay uint8 and become float32 batch by batch: a float copy would take four times the memory.
    """

    name: str
    train_images: np.ndarray
    """[n, C, S, S] uint8."""
    train_labels: np.ndarray
    """[n] int64, 0 to num_classes - 1."""
    test_images: np.ndarray
    test_labels: np.ndarray
    scale: int
    """The value that becomes 1.0: 255, or 16 for scikit-learn's digits."""
    source: str
    """Where the data came from, for the run's record."""
    sha256: str
    """Checksum of the file, or of the arrays where they come from a library or from pictures."""
    origins: tuple[tuple[str, str], ...] = ()
    """Of each class: the data set that it is from, and its label (or folder) there; `name` and the label if not given.
    """

    def __post_init__(self) -> None:
        if not self.origins:
            classes = int(self.train_labels.max()) + 1
            object.__setattr__(self, "origins", tuple((self.name, str(label)) for label in range(classes)))

    @property
    def num_classes(self) -> int:
        return len(self.origins)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, S, S)."""
        return tuple(self.train_images.shape[1:])

    @property
    def part_sizes(self) -> list[int]:
        """Classes of each data set that this one was joined from, in order."""
        names = [name for name, _ in self.origins]
        return [names.count(name) for name in dict.fromkeys(names)]

    def to_float(self, images: np.ndarray) -> Tensor:
        """uint8 [B, C, S, S] of this data set → float32 in [0, 1]."""
        return torch.from_numpy(images).to(torch.float32).div_(self.scale)


def fitted(data: Dataset, shape: tuple[int, int, int]) -> Dataset:
    """The same images as [C, S, S]: grey becomes C equal colours, and smaller ones get an even margin of zeros.

    `DataError` where that would lose something: colours become no grey, larger images no smaller ones.
    """
    if data.image_shape == shape:
        return data
    (channels, side, _), (wanted, size, _) = data.image_shape, shape
    if channels not in (1, wanted) or side > size or (size - side) % 2:
        raise DataError(f"{data.name}: images of {list(data.image_shape)} cannot be shown as {list(shape)}")
    margin = (size - side) // 2

    def fit(images: np.ndarray) -> np.ndarray:
        images = np.pad(images, [(0, 0), (0, 0), (margin, margin), (margin, margin)])
        return np.repeat(images, wanted // channels, axis=1)

    return dataclasses.replace(data, train_images=fit(data.train_images), test_images=fit(data.test_images))


def joined(parts: Sequence[Dataset]) -> Dataset:
    """Several data sets of one image shape as one: the classes of each come after those of the one before it."""
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise DataError(f"dataset: expected different data sets, got {'+'.join(names)}")
    offsets = np.cumsum([0, *(part.num_classes for part in parts)])
    arrays = {}
    for name in ("train_images", "test_images"):
        arrays[name] = np.concatenate([_to_255(getattr(part, name), part.scale) for part in parts])
    for name in ("train_labels", "test_labels"):
        shifted = [getattr(part, name) + offset for part, offset in zip(parts, offsets, strict=False)]
        arrays[name] = np.concatenate(shifted)
    return Dataset(
        name="+".join(names),
        **arrays,
        scale=255,
        source=" + ".join(part.source for part in parts),
        sha256=hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest(),
        origins=tuple(origin for part in parts for origin in part.origins),
    )


def checked(
    name: str,
    arrays: Mapping[str, np.ndarray],
    source: str,
    sha256: str,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """The data set of `x_train`, `y_train`, `x_test` and `y_test` in the layout of Keras.

    Images are uint8 [n, S, S], [n, S, S, 1] or [n, S, S, 3], labels whole numbers [n] or [n, 1]. Every label from 0 to
    the largest must occur in both parts: a class that is never tested would count for nothing, one that is never
    trained against the learner. Images that occur twice raise a warning (see `count_duplicates`).

    Raises:
        DataError: naming the array, what was expected and what came.
    """
    images, labels = {}, {}
    for part in ("train", "test"):
        images[part] = _checked_images(f"x_{part}", arrays[f"x_{part}"])
        labels[part] = _checked_labels(f"y_{part}", arrays[f"y_{part}"], len(images[part]))
    if images["train"].shape[1:] != images["test"].shape[1:]:
        raise DataError(f"x_test: expected images as in x_train {images['train'].shape}, got {images['test'].shape}")
    present = {part: set(np.unique(labels[part]).tolist()) for part in labels}
    expected = set(range(len(classes) if classes else max(present["train"] | present["test"]) + 1))
    for part, seen in present.items():
        if seen != expected:
            absent = min(expected - seen)
            raise DataError(f"y_{part}: expected every label from 0 to {len(expected) - 1}, class {absent} is empty")
    origins = tuple((name, label) for label in classes or ())
    data = Dataset(name, images["train"], labels["train"], images["test"], labels["test"], 255, source, sha256, origins)
    _warn_of_duplicates(data)
    return data


def count_duplicates(data: Dataset) -> dict[str, int]:
    """Images that are pixel by pixel the same as an earlier one.

    Returns:
        `repeated`: training images that came before in the training set; `leaked`: test images that are training
        images too; `contradicting`: those of either kind whose label is another than the earlier image's.
    """
    counts = dict.fromkeys(("repeated", "leaked", "contradicting"), 0)
    known: dict[bytes, int] = {}
    train = zip(data.train_images, data.train_labels.tolist(), strict=True)
    test = zip(data.test_images, data.test_labels.tolist(), strict=True)
    for kind, part in (("repeated", train), ("leaked", test)):
        for image, label in part:
            key = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            if key in known:
                counts[kind] += 1
                counts["contradicting"] += known[key] != label
            elif kind == "repeated":
                known[key] = label
    return counts


def checksum(*arrays: np.ndarray) -> str:
    """sha256 over the bytes of arrays, one after another."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _warn_of_duplicates(data: Dataset) -> None:
    counts = count_duplicates(data)
    if any(counts.values()):
        warnings.warn(
            f"{data.name}: {counts['repeated']} training images occur more than once, {counts['leaked']} test images "
            f"are training images too, {counts['contradicting']} of these have contradicting labels; all are used",
            stacklevel=2,
        )


def _to_255(images: np.ndarray, scale: int) -> np.ndarray:
    return images if scale == 255 else np.round(images * (255 / scale)).astype(np.uint8)


def _checked_images(key: str, array: np.ndarray) -> np.ndarray:
    if array.dtype != np.uint8:
        raise DataError(f"{key}: expected uint8, got {array.dtype}")
    layout = array.ndim == 3 or (array.ndim == 4 and array.shape[3] in (1, 3))
    if not layout or array.shape[1] != array.shape[2] or not len(array):
        raise DataError(f"{key}: expected [n, S, S], [n, S, S, 1] or [n, S, S, 3], got {list(array.shape)}")
    return array[:, None] if array.ndim == 3 else np.ascontiguousarray(array.transpose(0, 3, 1, 2))


def _checked_labels(key: str, array: np.ndarray, count: int) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{key}: expected whole numbers, got {array.dtype}")
    # Keras stores CIFAR's labels as a column.
    if array.shape not in ((count,), (count, 1)):
        raise DataError(f"{key}: expected [{count}], one label per image, got {list(array.shape)}")
    if array.min() < 0:
        raise DataError(f"{key}: expected labels of at least 0, got {array.min()}")
    return array.reshape(count).astype(np.int64)
