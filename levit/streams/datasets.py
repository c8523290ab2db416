"""Data sets by name or path: digits ship with scikit-learn, others are .npz files, folders, or torchvision's."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from levit.config import LEViTConfig
from levit.streams.dataset import DataError, Dataset, checked, checksum, fitted, joined
from levit.streams.folders import LAYOUT, SPLITS, load_folder, load_miniimagenet
from levit.streams.vision import TORCHVISION, load_torchvision

KEYS = ("x_train", "y_train", "x_test", "y_test")


def default_data_dir() -> Path:
    """$LEVIT_DATA, else ~/.cache/levit/data."""
    return Path(os.environ.get("LEVIT_DATA") or "~/.cache/levit/data").expanduser()


def configured_dataset(cfg: LEViTConfig, data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """The data that a configuration's stream is made of; scenario `joined` joins several as C × S × S images.

    Raises:
        DataError: see `load_dataset`; or images that cannot be brought to one shape.
    """
    shape = (cfg.channels, cfg.image_size, cfg.image_size)
    if cfg.scenario != "joined":
        return load_dataset(cfg.dataset, data_dir, download, shape)
    names = cfg.dataset.split("+")
    if len(names) < 2:
        raise DataError(f"dataset: scenario joined expects several, as in mnist+fashion; got {cfg.dataset!r}")
    return joined([fitted(load_dataset(name, data_dir, download, shape), shape) for name in names])


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    download: bool = False,
    shape: tuple[int, int, int] | None = None,
) -> Dataset:
    """A data set by name or path.

    - `digits`;
    - a path, with a slash in it or ending in .npz: a file in the layout of Keras, or a folder as ImageFolder takes it;
    - any other name: `<data_dir>/<name>.npz`, else the folder `<data_dir>/<name>`, else torchvision's files below
      `data_dir`.

    Args:
        name: the name or path.
        data_dir: folder of the files; None means `default_data_dir()`.
        download: let torchvision fetch what is missing.
        shape: (C, S, S) that pictures of a folder are brought to; arrays stay as they are.

    Raises:
        DataError: missing, truncated, mis-shaped or mislabelled data.
    """
    if name == "digits":
        return _digits()
    folder = Path(data_dir).expanduser() if data_dir is not None else default_data_dir()
    if "/" in name or os.sep in name or name.endswith(".npz"):
        path = Path(name).expanduser()
        if not path.exists():
            raise DataError(f"{path}: no such file or folder. A data set is an .npz file ({_LAYOUT}), or {LAYOUT}")
        return load_folder(path.name, path, shape) if path.is_dir() else _from_npz(path.stem, path, f"{_LAYOUT}.")
    help_text = how_to_get(name, folder)
    if (path := folder / f"{name}.npz").exists():
        return _from_npz(name, path, help_text)
    if (path := folder / name).is_dir():
        is_mini = name == "miniimagenet" and any((path / split).exists() for split in SPLITS)
        return load_miniimagenet(path, shape) if is_mini else load_folder(name, path, shape)
    if name in TORCHVISION:
        return load_torchvision(name, folder, download, help_text)
    raise DataError(f"{folder / f'{name}.npz'}: no such file. {help_text}")


_LAYOUT = (
    "arrays x_train [n, S, S] or [n, S, S, 3] and y_train [n], x_test and y_test alike, all uint8: the layout of Keras"
)


def how_to_get(name: str, folder: Path) -> str:
    """One or two sentences: the files that would do, and torchvision's command where it knows the data set."""
    put = f"Put {name}.npz there: {_LAYOUT}"
    if name == "miniimagenet":
        return (
            f"{put}; or the folder {folder / name} with images/ and {', '.join(SPLITS)} (filename,label), or with one "
            "folder per class. Its pickled caches (.pkl) are never opened: unpickling runs code"
        )
    if name not in TORCHVISION:
        known = ", ".join(["digits", "miniimagenet", *TORCHVISION])
        return f"{put}; or {folder / name}, {LAYOUT}. By name there are also {known}."
    known = TORCHVISION[name]
    arguments = (
        "split=part, download=True) for part in ('train', 'test')"
        if known.kind == "SVHN"
        else ("part, download=True) for part in (True, False)")
    )
    command = f"from torchvision.datasets import {known.kind} as D; [D({str(folder)!r}, {arguments}]"
    return f'{put}; or pass --download; or run: python -c "{command}"'


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
        sha256=checksum(images, labels),
    )


def _from_npz(name: str, path: Path, help_text: str) -> Dataset:
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
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or no .npz file ({error}). Delete it first. {help_text}") from error
    try:
        return checked(name, arrays, str(path), digest.hexdigest())
    except DataError as error:
        raise DataError(f"{path}: {error}. {help_text}") from None
