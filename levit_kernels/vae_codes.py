"""Sampled codes of K MLP VAEs, which the memory keeps beside each image (equation 6 of SPEC.md needs them later)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _vae
from ._check import Shapes
from .backends.registry import run


def vae_codes(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """mu + sigma * noise of K VAEs. Frozen experts are asked, so there are no gradients: call it under `no_grad`.

    Args:
        images: `[M,F]`, flattened C,H,W.
        encoder: as of `levit_kernels.expansion_distances`.
        noise: `[K,M,L]`.
        bf16: where the tensors are float32, the factors of matrix products may be rounded to bfloat16; sums and results
            stay float32. A backend that has no such products ignores it.

    Returns:
        `[K,M,L]` in the dtype of the images.

    Raises:
        ValueError: a shape or device; TypeError: a dtype (all tensors share one).
    """
    shapes = Shapes("vae_codes")
    shapes.match("images", images, "M F")
    _vae.check_encoder(shapes, encoder)
    shapes.match("noise", noise, "K M L")
    return run("vae_codes", images, encoder, noise, bf16) if len(images) else torch.empty_like(noise)


def vae_codes_reference(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """The same in plain torch."""
    mu, logsigma = _vae.encode(images, encoder)
    return mu + logsigma.exp() * noise
