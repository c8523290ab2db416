"""Data sets that are pictures in folders: torchvision's ImageFolder layout, and Mini-ImageNet's. Needs Pillow."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from levit.streams.dataset import DataError, Dataset, checked, checksum

EXTENSIONS = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
"""Those of torchvision's ImageFolder; other files are passed over."""

HOLD_OUT = 5
"""Where pictures have no test part of their own, every fifth of each class, in the order of the names, is one."""

LAYOUT = (
    "a folder with train/CLASS/*.png and test/CLASS/*.png, or with CLASS/*.png alone (every fifth picture of a class "
    "is then a test image)"
)

SPLITS = ("train.csv", "val.csv", "test.csv")
"""Mini-ImageNet's lists, columns filename and label; the classes of the three are disjoint."""


def load_folder(name: str, path: Path, shape: tuple[int, int, int] | None = None) -> Dataset:
    """The data set in a folder of pictures, one folder per class; classes are numbered in the order of their names.

    Either `train` and `test` hold the classes' folders (`val` serves where there is no `test`), or the folder itself
    does and every fifth picture of a class is a test image.

    Args:
        name: what to call it.
        path: the folder.
        shape: (C, S, S) that pictures are brought to: the middle square, resized; grey for C = 1. None takes them as
            they are, in colour, all of one square size.

    Raises:
        DataError: no pictures, an empty class, classes that differ between the parts, a picture that cannot be read.
    """
    test = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    if (path / "train").is_dir() != (test is not None):
        raise DataError(f"{path}: train and test must both be there, or neither. Expected {LAYOUT}")
    if test is None:
        parts = _hold_out(_classes(path), path)
    else:
        parts = {"train": _classes(path / "train"), "test": _classes(test)}
        for label in sorted(set(parts["train"]) ^ set(parts["test"])):
            here, there = ("train", test.name) if label in parts["train"] else (test.name, "train")
            raise DataError(f"{path / there / label}: no such folder, though {path / here / label} is a class")
    return _read(name, str(path), parts, shape)


def load_miniimagenet(path: Path, shape: tuple[int, int, int] | None = None) -> Dataset:
    """Mini-ImageNet as it is handed around: `images/` and `train.csv`, `val.csv`, `test.csv` (`filename,label`).

    The lists split the 100 classes, for few-shot learning; here all classes are learned, and every fifth picture of a
    class, in the order of the lists, is a test image: 480 and 120 of 600 [D].

    Raises:
        DataError: a list or picture that is missing or damaged.
    """
    files: dict[str, list[Path]] = {}
    for split in SPLITS:
        try:
            with open(path / split, newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path / split}: cannot be read ({error})") from error
        if not rows or set(rows[0]) != {"filename", "label"} or any(not all(row.values()) for row in rows):
            raise DataError(f"{path / split}: expected the columns filename and label in every line")
        for row in rows:
            files.setdefault(row["label"], []).append(path / "images" / row["filename"])
    return _read("miniimagenet", str(path), _hold_out(files, path), shape)


def _hold_out(files: dict[str, list[Path]], path: Path) -> dict[str, dict[str, list[Path]]]:
    """Every fifth picture of each class apart."""
    for label, group in files.items():
        if len(group) < HOLD_OUT:
            raise DataError(
                f"{path}: class {label}: expected at least {HOLD_OUT} pictures, every fifth being a test image, "
                f"got {len(group)}"
            )
    train = {label: [file for i, file in enumerate(group, 1) if i % HOLD_OUT] for label, group in files.items()}
    return {"train": train, "test": {label: group[HOLD_OUT - 1 :: HOLD_OUT] for label, group in files.items()}}


def _classes(path: Path) -> dict[str, list[Path]]:
    """The pictures of each class folder, sorted as torchvision sorts them."""
    found = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        found[folder.name] = sorted(file for file in folder.rglob("*") if file.suffix.lower() in EXTENSIONS)
        if not found[folder.name]:
            raise DataError(f"{folder}: this class is empty (no {', '.join(sorted(EXTENSIONS))})")
    if not found:
        raise DataError(f"{path}: no class folders here. Expected {LAYOUT}")
    return found


def _read(
    name: str, source: str, parts: dict[str, dict[str, list[Path]]], shape: tuple[int, int, int] | None
) -> Dataset:
    labels = sorted(parts["train"])
    arrays = {}
    for part, files in parts.items():
        counts = [len(files[label]) for label in labels]
        arrays[f"x_{part}"] = _pictures([file for label in labels for file in files[label]], shape)
        arrays[f"y_{part}"] = np.repeat(np.arange(len(labels)), counts)
    try:
        return checked(name, arrays, source, checksum(*arrays.values()), labels)
    except DataError as error:
        raise DataError(f"{source}: {error}") from None


def _pictures(files: Sequence[Path], shape: tuple[int, int, int] | None) -> np.ndarray:
    """[n, S, S] or [n, S, S, 3] uint8."""
    images: np.ndarray | None = None
    for i, file in enumerate(files):
        picture = read_picture(file, *(shape[:2] if shape else (3, None)))
        if images is None:
            images = np.empty((len(files), *picture.shape), np.uint8)
        if picture.shape != images.shape[1:]:
            raise DataError(f"{file}: {list(picture.shape)} where {files[0]} is {list(images.shape[1:])}")
        images[i] = picture
    return images


def read_picture(file: Path, channels: int, side: int | None = None) -> np.ndarray:
    """One picture, grey [height, width] or in colour [height, width, 3], uint8; its middle square as side × side.

    `DataError` where it cannot be had.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{file}: pictures need Pillow (pip install pillow); .npz files do not") from error
    try:
        with Image.open(file) as picture:
            # Pillow cuts 16-bit and float greys off at 255 instead of scaling them.
            if picture.mode[0] in "IF":
                raise DataError(f"{file}: expected 8 bits per colour, got a picture of mode {picture.mode}")
            picture = picture.convert("L" if channels == 1 else "RGB")
            return np.asarray(picture if side is None else _square(picture, side))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: missing, truncated or no picture ({error})") from error


def _square(picture, side: int):  # noqa: ANN001 (Pillow is optional)
    """The middle square, resized to side × side."""
    if picture.size == (side, side):
        return picture
    short = min(picture.size)
    left, top = ((length - short) // 2 for length in picture.size)
    return picture.crop((left, top, left + short, top + short)).resize((side, side))
