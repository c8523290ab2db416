"""A trained run at work: its model, its accuracy, its answer to image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from levit import metrics
from levit.config import LEViTConfig
from levit.families import family_of
from levit.runs import RunDirectory, RunError
from levit.streams import Stream
from levit.streams.folders import read_picture


def run_config(run: RunDirectory) -> LEViTConfig:
    """The configuration of a run; `RunError` where this version knows a field no more."""
    try:
        config = run.read_config()
        return family_of(config["preset"]).config(**config["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run / 'config.json'}: not a configuration of this version of levit ({error})") from error


def load_model(
    run: RunDirectory, device: str = "cpu", routing: str | None = None, prior: str | None = None
) -> nn.Module:
    """The model of a run's latest checkpoint; `RunError` where there is none or it does not fit.

    With `routing` or `prior` it answers by another rule than the run's; `ValueError` where the run kept nothing for it.
    """
    cfg = run_config(run)
    state = run.load_checkpoint()
    if state is None:
        raise RunError(f"{run.path}: no checkpoint yet; let the run go on for a while (levit train … --resume)")
    config = run.read_config()
    model = family_of(config["preset"]).model(cfg, config["options"]["method"]).to(device)
    try:
        model.load_state_dict(state["learner"]["model"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(f"{run / 'checkpoint.pt'}: does not fit the run's configuration ({error})") from error
    for field, rule in (("routing", routing), ("prior", prior)):
        if rule is not None and rule != getattr(cfg, field, None):
            router = getattr(model, "router", None)
            if router is None:
                raise ValueError(f"{field}: {run.path} kept nothing to answer by but what it was trained with")
            router.switch(**{field: rule})
    return model


def evaluate(
    model: nn.Module,
    stream: Stream,
    device: str = "cpu",
    by_task: bool = False,
    seen: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Accuracies (0 to 1) over the whole test set and by experience, and how many images each expert was given.

    Args:
        model: the model.
        stream: whose test images are taken.
        device: where the model is.
        by_task: add the protocol that tells the model which images belong together, under the key `by-task (leaks)`.
        seen: what each expert was trained on (`metrics.route_accuracy`), which adds the route accuracy.
    """
    test, count = stream.test, len(stream.ends)
    if by_task and not hasattr(model, "elbo_loss"):
        raise ValueError("by_task: this method has no VAE to choose an expert by")
    predicted, chosen = metrics.answers(model, test.images, device)
    result = {
        "accuracy": metrics.accuracy(predicted, test.labels),
        "accuracy_by_experience": metrics.accuracy_by_experience(predicted, test.labels, test.experience, count),
        "images_by_expert": np.bincount(chosen, minlength=model.num_experts).tolist(),
    }
    if seen is not None:
        result["route_accuracy"] = metrics.route_accuracy(chosen, test.kinds, seen)
    if by_task:
        result["by-task (leaks)"] = metrics.by_task_accuracy(model, test, count, device)
    return result


def predict(model: nn.Module, images: Tensor) -> list[dict[str, Any]]:
    """For each image [B, C, S, S]: label, expert, confidence, known (`levit.routing.Prediction`)."""
    answers = []
    for part in images.split(metrics.EVALUATION_BATCH):
        prediction = model.predict(part)
        rows = zip(*(column.tolist() for column in prediction), strict=True)
        answers += [dict(zip(prediction._fields, row, strict=True)) for row in rows]
    return answers


def read_images(path: str | Path, cfg: LEViTConfig) -> Tensor:
    """Images of a file for a model of this configuration: [B, C, S, S] float32 in [0, 1].

    An .npz holds one array, or one named `images` or `x_test`: [n, S, S], [n, S, S, C] or [n, C, S, S], uint8 (divided
    by 255) or float in [0, 1]. Any other file is opened as a picture (needs Pillow) and must have the right size;
    colours become grey where the model has one channel.

    Raises:
        ValueError: the file is missing, unreadable or of another size; it is named.
    """
    path = Path(path)
    try:
        array = _read_npz(path) if path.suffix == ".npz" else read_picture(path, cfg.channels)[None]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as images ({error.strerror or error})") from error
    shape = (cfg.channels, cfg.image_size, cfg.image_size)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1:] != shape:
        array = array.transpose(0, 3, 1, 2)
    if array.shape[1:] != shape:
        c, s = cfg.channels, cfg.image_size
        raise ValueError(f"{path}: expected images of {s}x{s} pixels, {c} channel(s), got an array {list(array.shape)}")
    if array.dtype == np.uint8:
        return torch.tensor(array).to(torch.float32) / 255
    if not np.issubdtype(array.dtype, np.floating) or not (array.min() >= 0 and array.max() <= 1):
        got = f"{array.dtype}, {array.min()} to {array.max()}"
        raise ValueError(f"{path}: expected uint8, or floats in [0, 1]; got {got}")
    return torch.tensor(array, dtype=torch.float32)


def _read_npz(path: Path) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in ("images", "x_test") if name in file] or file.files
            if len(names) != 1:
                raise ValueError(f"expected one array, or one named images or x_test, got {', '.join(file.files)}")
            array = file[names[0]]
    except OSError:
        raise
    except Exception as error:  # numpy raises what the zip, zlib and pickle modules do
        raise ValueError(f"{path}: {error}") from error
    if not array.size:
        raise ValueError(f"{path}: holds no image")
    return array
