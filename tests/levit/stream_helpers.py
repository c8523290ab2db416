"""Tiny data sets, on disk and in memory, that the tests of streams and runs share."""

import numpy as np
from PIL import Image

from levit.streams import Dataset


def keras_arrays(size=28, classes=10, train=6, test=2, colours=None, seed=0):
    """Arrays of Keras' layout with `train` and `test` images per class; every image is of one brightness, its own."""
    random = np.random.RandomState(seed)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        labels = random.permutation(np.repeat(np.arange(classes), count))
        shape = (len(labels), size, size) if colours is None else (len(labels), size, size, colours)
        arrays[f"x_{part}"] = random.randint(0, 256, shape).astype(np.uint8)
        arrays[f"y_{part}"] = labels.astype(np.uint8)
    return arrays


def write_npz(folder, name="mnist", **arrays):
    path = folder / f"{name}.npz"
    np.savez(path, **arrays)
    return path


def dataset(train=(5, 5, 5, 5), test=(2, 2, 2, 2), size=2):
    """A data set with train[c] and test[c] images of class c, shuffled; the pixels of image i all have value i."""
    random = np.random.RandomState(1)
    labels = {part: random.permutation(np.repeat(np.arange(len(n)), n)) for part, n in (("a", train), ("b", test))}
    images = {part: np.arange(len(y), dtype=np.uint8)[:, None, None, None] for part, y in labels.items()}
    images = {part: np.broadcast_to(x, (len(x), 1, size, size)).copy() for part, x in images.items()}
    return Dataset("tiny", images["a"], labels["a"], images["b"], labels["b"], 255, "made up", "0")


def save_pictures(folder, shades, side):
    """One picture of a single shade each, named so that they sort by shade."""
    folder.mkdir(parents=True, exist_ok=True)
    for shade in shades:
        Image.fromarray(np.full((side, side, 3), shade, np.uint8)).save(folder / f"{shade:03d}.png")
