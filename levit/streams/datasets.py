"""Data sets by name: `digits` ships with scikit-learn, every other is a Keras-layout .npz, else torchvision's."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TORCHVISION = {"mnist": "MNIST", "fashion": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
"""Our name of a data set to torchvision's class."""

KEYS = ("x_train", "y_train", "x_test", "y_test")


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
    """Checksum of the file, or of the arrays where they come from a library."""

    @property
    def num_classes(self) -> int:
        return int(self.train_labels.max()) + 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, S, S)."""
        return tuple(self.train_images.shape[1:])

    def to_float(self, images: np.ndarray) -> Tensor:
        """uint8 [B, C, S, S] of this data set → float32 in [0, 1]."""
        return torch.from_numpy(images).to(torch.float32).div_(self.scale)


def default_data_dir() -> Path:
    """$LEVIT_DATA, else ~/.cache/levit/data."""
    return Path(os.environ.get("LEVIT_DATA") or "~/.cache/levit/data").expanduser()


def load_dataset(name: str, data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """The data set `name`: `digits`; else `<data_dir>/<name>.npz`; else torchvision's files below `data_dir`.

    Args:
        name: `digits`, one of `TORCHVISION`, or the stem of your own .npz file.
        data_dir: folder of the files; None means `default_data_dir()`.
        download: let torchvision fetch what is missing.

    Raises:
        DataError: missing, truncated, mis-shaped or mislabelled data.
    """
    if name == "digits":
        return _digits()
    folder = Path(data_dir).expanduser() if data_dir is not None else default_data_dir()
    path = folder / f"{name}.npz"
    if path.exists():
        return _from_npz(name, path)
    if name in TORCHVISION:
        return _from_torchvision(name, folder, download)
    raise DataError(f"{path}: no such file. {how_to_get(name, folder)}")


def how_to_get(name: str, folder: Path) -> str:
    """One or two sentences: the file that would do, and torchvision's command where it knows the data set."""
    layout = (
        f"Put {name}.npz there: arrays x_train [n, S, S] or [n, S, S, 3] and y_train [n], x_test and y_test alike, "
        "all uint8 (the layout of Keras)"
    )
    if name not in TORCHVISION:
        return f"{layout}. By name there are also digits, {', '.join(TORCHVISION)}."
    make = f"[D({str(folder)!r}, part, download=True) for part in (True, False)]"
    command = f"from torchvision.datasets import {TORCHVISION[name]} as D; {make}"
    return f'{layout}; or pass --download; or run: python -c "{command}"'


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    # The file lists the digits writer by writer: every fifth of each class puts all writers on both sides.
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Dataset(
        name="digits",
        train_images=images[~test],
        train_labels=labels[~test],
        test_images=images[test],
        test_labels=labels[test],
        scale=16,
        source="scikit-learn",
        sha256=_checksum(images, labels),
    )


def _from_npz(name: str, path: Path) -> Dataset:
    help_text = how_to_get(name, path.parent)
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in KEYS if key not in file]
            if missing:
                raise DataError(f"{path}: array {missing[0]} is missing. {help_text}")
            arrays = {key: file[key] for key in KEYS}
        digest = hashlib.sha256()
        with open(path, "rb") as raw:
            while block := raw.read(1 << 22):
                digest.update(block)
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or no .npz file ({error}). Delete it first. {help_text}") from error
    try:
        return _checked(name, arrays, str(path), digest.hexdigest())
    except DataError as error:
        raise DataError(f"{path}: {error}. {help_text}") from None


def _from_torchvision(name: str, folder: Path, download: bool) -> Dataset:
    help_text = how_to_get(name, folder)
    try:
        import torchvision
    except ImportError as error:
        raise DataError(
            f"{folder / f'{name}.npz'}: no such file, and torchvision, which could fetch it, is not installed "
            f"(pip install torchvision). {help_text}"
        ) from error
    make = getattr(torchvision.datasets, TORCHVISION[name])
    try:
        parts = [make(folder, train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        what = "the download failed or broke off; run it again" if download else "not found or damaged"
        raise DataError(f"{name}: {what} below {folder} ({str(error).strip().rstrip('.')}). {help_text}") from error
    arrays = {}
    for suffix, part in zip(("train", "test"), parts, strict=True):
        arrays[f"x_{suffix}"], arrays[f"y_{suffix}"] = np.asarray(part.data), np.asarray(part.targets)
    try:
        return _checked(name, arrays, f"torchvision {torchvision.__version__}", _checksum(*arrays.values()))
    except DataError as error:
        raise DataError(f"{name} below {folder}: {error}. {help_text}") from None


def _checked(name: str, arrays: dict[str, np.ndarray], source: str, sha256: str) -> Dataset:
    images, labels = {}, {}
    for part in ("train", "test"):
        images[part] = _checked_images(f"x_{part}", arrays[f"x_{part}"])
        labels[part] = _checked_labels(f"y_{part}", arrays[f"y_{part}"], len(images[part]))
    if images["train"].shape[1:] != images["test"].shape[1:]:
        raise DataError(f"x_test: expected images as in x_train {images['train'].shape}, got {images['test'].shape}")
    present = {part: set(np.unique(labels[part]).tolist()) for part in labels}
    classes = set(range(max(present["train"] | present["test"]) + 1))
    for part, seen in present.items():
        if seen != classes:
            absent = min(classes - seen)
            raise DataError(f"y_{part}: expected every label from 0 to {len(classes) - 1}, class {absent} is empty")
    return Dataset(name, images["train"], labels["train"], images["test"], labels["test"], 255, source, sha256)


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


def _checksum(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
