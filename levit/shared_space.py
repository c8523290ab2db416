"""Streaming LDA over features that all experts share: a classifier by itself, and what `routing="shared"` asks.

Filters are fixed from the first images of the stream, which wait until there are enough of them; then every labelled
image is taken in once. No expert, no boundary, no task label is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from levit.config import LEViTConfig
from levit.lda import StreamingLDA
from levit.patch_features import PatchFeatures

FIRST = 200
"""Images that the filters are drawn from."""

REFRESH = 64
"""Labelled images after which `recent_logits` are solved anew; a tenth of all there are, later, and 2000 at most."""


class SharedSpace(nn.Module):
    """`PatchFeatures`, then `StreamingLDA`; answers from the first labelled image on. Only buffers.

    Args:
        cfg: its image shape, `num_classes`, `shared_filters` and `seed`.
        waiting: images that wait for the filters to be fixed (of a state that is about to be loaded).
    """

    def __init__(self, cfg: LEViTConfig, waiting: int = 0) -> None:
        super().__init__()
        self.features = PatchFeatures(cfg.channels, cfg.image_size, cfg.shared_filters, cfg.seed)
        self.lda = StreamingLDA(self.features.dim, cfg.num_classes)
        shape = (waiting, cfg.channels, cfg.image_size, cfg.image_size)
        self.register_buffer("waiting", torch.zeros(shape))
        self.register_buffer("waiting_labels", torch.zeros(waiting, dtype=torch.int64))
        self.register_buffer("fixed", torch.tensor(False))
        # Logits that change rarely serve where solving anew at each batch would cost more than learning does.
        self.register_buffer("recent_weights", torch.zeros(self.features.dim, cfg.num_classes))
        self.register_buffer("recent_bias", torch.full((cfg.num_classes,), -torch.inf))
        self.register_buffer("recent_count", torch.tensor(0))
        self._draft: tuple[PatchFeatures, StreamingLDA] | None = None

    @torch.no_grad()
    def observe(self, images: Tensor, labels: Tensor) -> None:
        """Take in images [B, C, S, S] with labels [B]; a negative one is none, such an image may only give filters."""
        self._draft = None
        if not self.fixed:
            room = FIRST - len(self.waiting)
            self.waiting = torch.cat([self.waiting, images[:room]])
            self.waiting_labels = torch.cat([self.waiting_labels, labels[:room]])
            images, labels = images[room:], labels[room:]
            if len(self.waiting) < FIRST:
                return
            self.features.fit(self.waiting)
            self.fixed.fill_(True)
            self._learn(self.waiting, self.waiting_labels)
            self.waiting, self.waiting_labels = self.waiting[:0].clone(), self.waiting_labels[:0].clone()
        self._learn(images, labels)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, S, S] → class logits [B, classes] with all that was seen; −∞ for classes not seen, if any was."""
        features, lda = self._current()
        return lda(features(images))

    @torch.no_grad()
    def recent_logits(self, images: Tensor) -> Tensor:
        """As `forward`, with what was seen a while ago; the classes not seen then have −∞."""
        return self.features(images) @ self.recent_weights + self.recent_bias

    def _learn(self, images: Tensor, labels: Tensor) -> None:
        if not len(images):
            return
        labelled = labels >= 0
        self.lda.observe(self.features(images[labelled]), labels[labelled])
        count = int(self.lda.counts.sum())
        before = int(self.recent_count)
        if count - before >= min(max(REFRESH, before // 10), 2000):
            weights, bias = self.lda.solve()
            self.recent_weights.copy_(weights)
            self.recent_bias.copy_(bias)
            self.recent_count.fill_(count)

    def _current(self) -> tuple[PatchFeatures, StreamingLDA]:
        """Features and LDA to answer with: before the filters are fixed, made from the images that wait."""
        if self.fixed or not len(self.waiting):
            return self.features, self.lda
        if self._draft is None:
            kernel = self.features.kernel
            features = PatchFeatures(kernel.shape[1], self.waiting.shape[-1], len(kernel), self.features.seed)
            lda = StreamingLDA(features.dim, len(self.lda.counts))
            features, lda = features.to(kernel), lda.to(kernel)
            features.fit(self.waiting)
            lda.observe(features(self.waiting), self.waiting_labels)
            self._draft = features, lda
        return self._draft

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SharedSpace:
        self._draft = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._draft = None
        super()._load_from_state_dict(*args, **kwargs)
