"""Augmentation of training batches, from one generator: a run that was stopped goes on with the same images."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_mirror(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B, C, S, S], each shifted by up to an eighth of its side (zeros come in), and half of them mirrored."""
    count, channels, side, _ = images.shape
    margin = side // 8
    shift = torch.randint(0, 2 * margin + 1, (2, count, 1), generator=generator).to(images.device)
    mirrored = (torch.rand(count, 1, generator=generator) < 0.5).to(images.device)
    place = torch.arange(side, device=images.device)
    rows = shift[0] + place
    columns = shift[1] + torch.where(mirrored, place.flip(0), place)
    padded = F.pad(images, [margin] * 4)
    image, channel = torch.arange(count, device=images.device), torch.arange(channels, device=images.device)
    return padded[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def mix_up(images: Tensor, labels: Tensor, alpha: float, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """timm's MixUp of a batch: images [B, C, S, S], labels [B] → mixed images, targets [B, classes].

    An odd last image is left out. timm draws from NumPy's global numbers, which are as before afterwards.
    """
    try:
        from timm.data import Mixup
    except ImportError as error:
        raise ValueError("mixup: needs timm, which is not installed (pip install timm)") from error
    even = len(images) // 2 * 2
    mixer = Mixup(mixup_alpha=alpha, label_smoothing=0.0, num_classes=classes)
    before = np.random.get_state()
    try:
        np.random.seed(seed)
        mixed, targets = mixer(images[:even].clone(), labels[:even])
    finally:
        np.random.set_state(before)
    return mixed, targets.to(images.dtype)
