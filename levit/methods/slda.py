"""`slda`: the streaming LDA over random-patch features alone, no expert; in closed form, each image seen once.

What LEViT has to beat: where this is the better classifier, it is also the far cheaper one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from levit.checks import check_images, check_labels, check_values
from levit.config import LEViTConfig
from levit.examples import ENOUGH, EVERY
from levit.learner import Event
from levit.logistic import fit_slopes
from levit.reference import NO_LABEL
from levit.routing import Prediction
from levit.shared_space import SharedSpace

ROWS = 32
"""Held-out logits kept of each class, for the temperature."""


class SLDA(nn.Module):
    """`SharedSpace` with the interface of a LEViT of one expert. Only buffers, no parameter.

    Args:
        cfg: its image shape, `num_classes`, `shared_filters` and `seed`.
    """

    num_experts = 1

    def __init__(self, cfg: LEViTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.space = SharedSpace(cfg)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("taken", torch.zeros(cfg.num_classes, dtype=torch.int64))
        self.register_buffer("logits", torch.full((cfg.num_classes, ROWS, cfg.num_classes), -torch.inf))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, S, S] → class logits [B, num_classes]; −∞ for classes not seen, 0 before the first."""
        return self.space(self.check_images(images))

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` and `route` say of images [B, C, S, S]."""
        return self(images), self.route(images)

    def route(self, images: Tensor) -> Tensor:
        """There is no choice: [B, C, S, S] → zeros [B]."""
        return torch.zeros(len(self.check_images(images)), dtype=torch.int64, device=images.device)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Prediction:
        """Label, expert 0 and confidence of images [B, C, S, S]; all count as known, an LDA has no way to tell.

        The temperature of the softmax is fitted on logits that arriving images had before they were learned.
        """
        rows = self.logits.isfinite().any(-1)
        sharpness = 1.0
        if rows.sum() >= ENOUGH:
            own = torch.arange(len(self.taken), device=rows.device)[:, None].expand_as(rows)
            sharpness = float(fit_slopes(self.logits[rows][..., None], own[rows])) or 1.0
        confidence, label = (sharpness * self(images)).softmax(1).max(1)
        return Prediction(label, self.route(images), confidence, torch.ones_like(label, dtype=torch.bool))

    @torch.no_grad()
    def observe(self, images: Tensor, labels: Tensor) -> None:
        """Take in a batch [b, C, S, S] with labels [b], -1 for none."""
        due = range(-int(self.seen) % EVERY, len(images), EVERY)
        self.seen += len(images)
        for row, label in zip(self.space.recent_logits(images[list(due)]), labels[list(due)].tolist(), strict=True):
            if label >= 0 and row[label].isfinite():
                self.logits[label, self.taken[label] % ROWS] = row
                self.taken[label] += 1
        self.space.observe(images, labels)

    def check_images(self, images: Tensor) -> Tensor:
        """See `levit.checks.check_images`."""
        return check_images(images, self.cfg, self.logits)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state; one of another configuration raises `RuntimeError`."""
        space = SharedSpace(self.cfg, len(state_dict["space.waiting_labels"]))
        self.space = space.to(self.logits.device, self.logits.dtype)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


class SLDALearner:
    """The interface of `levit.Learner`: no memory, no expansion, no update by gradient.

    Args:
        model: an `SLDA`.
    """

    updates_per_batch = 0

    def __init__(self, model: SLDA) -> None:
        self.model = model

    def observe(self, images: Tensor, labels: Tensor) -> Event:
        """Take in a batch: images [b, C, S, S] in [0, 1], labels [b] with -1 for none, b ≥ 1."""
        images = self.model.check_images(images)
        check_labels(images, labels)
        if not len(images):
            raise ValueError("images: expected at least 1, got an empty batch")
        check_values(images, labels, self.model.cfg.num_classes, NO_LABEL)
        self.model.observe(images, labels)
        return Event(expanded=False, distances=None, loss=None)

    def state_dict(self) -> dict[str, Any]:
        """The model's state is all there is."""
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.model.load_state_dict(state["model"])
