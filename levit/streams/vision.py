"""The data sets that torchvision knows how to fetch and to read: its own file formats, by its own readers."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from levit.streams.dataset import DataError, Dataset, checked, checksum


class Known(NamedTuple):
    """A data set of torchvision."""

    kind: str
    """Its class."""
    classes: int
    files: str
    """Where its files lie below the data folder."""

    def part(self, train: bool) -> dict[str, Any]:
        """The arguments that choose training or test images."""
        return {"split": "train" if train else "test"} if self.kind == "SVHN" else {"train": train}


TORCHVISION = {
    "mnist": Known("MNIST", 10, "MNIST/raw"),
    "fashion": Known("FashionMNIST", 10, "FashionMNIST/raw"),
    "cifar10": Known("CIFAR10", 10, "cifar-10-batches-py"),
    "cifar100": Known("CIFAR100", 100, "cifar-100-python"),
    "svhn": Known("SVHN", 10, "*_32x32.mat"),
}
"""By our name."""


def load_torchvision(name: str, folder: Path, download: bool, how_to_get: str) -> Dataset:
    """The data set `name` of `TORCHVISION`, from torchvision's files below `folder`; fetched first, if `download`.

    torchvision checks the files of CIFAR and SVHN against their known checksums before it opens them.

    Raises:
        DataError: torchvision or the files are missing, or the files are damaged.
    """
    known = TORCHVISION[name]
    try:
        import torchvision
    except ImportError as error:
        raise DataError(
            f"{folder / f'{name}.npz'}: no such file, and torchvision, which could fetch it, is not installed "
            f"(pip install torchvision). {how_to_get}"
        ) from error
    make = getattr(torchvision.datasets, known.kind)
    try:
        parts = [make(folder, download=download, **known.part(train)) for train in (True, False)]
    # A damaged file ends in whatever its reader stumbles over: TypeError and AssertionError come from MNIST's.
    except (OSError, HTTPException, RuntimeError, EOFError, ValueError, TypeError, AssertionError, KeyError) as error:
        what = "the download failed or broke off; run it again" if download else "not found or damaged"
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise DataError(
            f"{name}: {what} below {folder} ({reason}). If {folder / known.files} exists, delete it first. {how_to_get}"
        ) from error
    arrays = {}
    for suffix, part in zip(("train", "test"), parts, strict=True):
        images = np.asarray(part.data)
        arrays[f"x_{suffix}"] = images.transpose(0, 2, 3, 1) if known.kind == "SVHN" else images
        arrays[f"y_{suffix}"] = np.asarray(part.labels if known.kind == "SVHN" else part.targets)
    names = [str(label) for label in range(known.classes)]
    try:
        return checked(name, arrays, f"torchvision {torchvision.__version__}", checksum(*arrays.values()), names)
    except DataError as error:
        raise DataError(f"{name} below {folder}: {error}. {how_to_get}") from None
