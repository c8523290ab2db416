"""What every model and learner refuses: images and labels that it could not have meant."""

from __future__ import annotations

import torch
from torch import Tensor

from levit.config import LEViTConfig


def check_images(images: Tensor, cfg: LEViTConfig, like: Tensor) -> Tensor:
    """The images in the dtype of `like` ([0, 255] uint8 becomes [0, 1]), or `TypeError`/`ValueError`."""
    if not isinstance(images, Tensor):
        raise TypeError(f"images: expected a tensor, got {type(images).__name__}")
    shape = (cfg.channels, cfg.image_size, cfg.image_size)
    if images.dim() != 4 or images.shape[1:] != shape:
        raise ValueError(f"images: expected [B, {', '.join(map(str, shape))}], got {list(images.shape)}")
    if images.device != like.device:
        raise ValueError(f"images: expected on {like.device}, as the model, got {images.device}")
    if images.dtype == torch.uint8:
        return images.to(like.dtype) / 255
    if images.dtype != like.dtype:
        raise TypeError(f"images: expected {like.dtype} or torch.uint8, got {images.dtype}")
    return images


def check_labels(images: Tensor, labels: Tensor) -> None:
    """`TypeError` or `ValueError` unless labels are [B] int64 on the images' device."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: expected a tensor, got {type(labels).__name__}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels: expected torch.int64, got {labels.dtype}")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels: expected [{len(images)}], one per image, got {list(labels.shape)}")
    if labels.device != images.device:
        raise ValueError(f"labels: expected on {images.device}, as the images, got {labels.device}")


def check_values(images: Tensor, labels: Tensor, classes: int, lowest_label: int) -> None:
    """`ValueError` unless images are finite in [0, 1] and labels from `lowest_label` to classes - 1; none is empty.

    On a GPU this waits once, at the start of a step, when little else is queued.
    """
    bounds = torch.stack([bound.double() for x in (images, labels) for bound in torch.aminmax(x)]).tolist()
    low, high = bounds[:2]
    if not (low >= 0 and high <= 1):
        raise ValueError(f"images: expected finite values in [0, 1], got {low:g} to {high:g}; scale them first")
    low, high = map(int, bounds[2:])
    if low < lowest_label or high >= classes:
        none = " (-1: none)" if lowest_label < 0 else ""
        raise ValueError(f"labels: expected 0 to {classes - 1}{none}, got {low} to {high}")
