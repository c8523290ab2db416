"""A feature space that no expert owns: responses of random whitened patches of the first images, fixed ever after.

After Coates & Ng (2011), with patches drawn at random in place of learned centroids [D]. Nothing is trained, so what
was measured in this space early in the stream still holds; that is what a router over frozen experts needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FLAT = 0.02
"""Patches whose values deviate less (images are in [0, 1]) tell nothing and become no filter."""


class PatchFeatures(nn.Module):
    """Thresholded two-sided responses of fixed filters, averaged over the quarters of the image.

    Filters are patches of at most 6x6 (colour) or 5x5 pixels (grey), half the side of tiny images. Only buffers: the
    state says it all. Until `fit`, and for filters that no patch was left for, the features are 0.

    Args:
        channels, image_size: images are [C, S, S].
        filters: F, how many patches.
        seed: draws them.
    """

    def __init__(self, channels: int, image_size: int, filters: int, seed: int) -> None:
        super().__init__()
        self.side = max(1, min(5 if channels == 1 else 6, image_size // 2))
        self.stride = 1 if image_size < 16 else max(2, image_size // 16)
        self.seed = seed
        self.register_buffer("kernel", torch.zeros(filters, channels, self.side, self.side))
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(8 * filters))

    @property
    def dim(self) -> int:
        """Features per image, 8·F: each filter's positive and negative side in four quarters."""
        return len(self.centre)

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Draw filters, threshold and centre from images [B, C, S, S], B ≥ 1."""
        parts = F.unfold(images, self.side, stride=self.stride).transpose(1, 2).flatten(0, 1).double()
        parts = parts - parts.mean(1, keepdim=True)
        parts = parts[parts.square().mean(1).sqrt() > FLAT]
        self.kernel.zero_()
        if len(parts):
            values, vectors = torch.linalg.eigh(parts.T @ parts / len(parts))
            # Directions that images hardly take would be noise blown up, so small eigenvalues are raised.
            floor = 1e-3 * values.max() + 1e-12
            whiten = vectors @ ((values.clamp(min=0) + floor).rsqrt()[:, None] * vectors.T)
            order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(self.seed))
            drawn = F.normalize(parts[order[: len(self.kernel)].to(parts.device)] @ whiten)
            filters = drawn @ whiten
            filters = filters - filters.mean(1, keepdim=True)  # as good as taking the mean out of every patch
            self.kernel[: len(drawn)] = filters.unflatten(1, self.kernel.shape[1:]).to(self.kernel)
        responses = F.conv2d(images, self.kernel, stride=self.stride)
        self.threshold.copy_(0.5 * responses.square().mean().sqrt())
        self.centre.zero_()
        self.centre.copy_(self(images).mean(0))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, S, S] → [B, 8·F], about 0 on average over the images of `fit`."""
        responses = F.conv2d(images, self.kernel, stride=self.stride)
        sides = [F.adaptive_avg_pool2d(F.relu(side - self.threshold), 2).flatten(1) for side in (responses, -responses)]
        return torch.cat(sides, dim=1) - self.centre
