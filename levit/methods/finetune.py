"""`finetune`: one expert trained on each batch as it arrives and on nothing else; the floor of every table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from levit.config import LEViTConfig
from levit.learner import Event
from levit.reference import LEViT, features


class Finetune:
    """The interface of `levit.Learner` without memory, expansion or VAE training.

    Args:
        model: a `levit.reference.LEViT` of one expert (see `single_expert`).
        updates_per_batch: Adam steps per batch; None takes the configuration's.
    """

    def __init__(self, model: LEViT, updates_per_batch: int | None = None) -> None:
        if updates_per_batch is not None and (not isinstance(updates_per_batch, int) or updates_per_batch < 1):
            raise ValueError(f"updates_per_batch: expected a whole number of at least 1, got {updates_per_batch!r}")
        self.model = model
        self.updates_per_batch = updates_per_batch or model.cfg.updates_per_batch
        self.optimizer = torch.optim.Adam(model.active.parameters(), lr=model.cfg.learning_rate)

    def observe(self, images: Tensor, labels: Tensor) -> Event:
        """`updates_per_batch` steps of cross-entropy on this batch: images [b, C, S, S], labels [b], b ≥ 1."""
        images = self.model.check_images(images)
        self.model.check_labels(images, labels)
        if not len(images):
            raise ValueError("images: expected at least 1, got an empty batch")
        classes = self.model.cfg.num_classes
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"labels: expected 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")
        losses = []
        for _ in range(self.updates_per_batch):
            loss = F.cross_entropy(self._training_logits(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return Event(expanded=False, distances=None, loss=torch.stack(losses).mean().item())

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer: nothing else is carried from batch to batch."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _training_logits(self, images: Tensor) -> Tensor:
        # One image has no batch statistics: the running ones serve, and its features would else all become zero.
        batch_statistics = len(images) > 1
        expert = self.model.active
        return expert.head(features(expert, images, self.model.cfg, batch_statistics), batch_statistics)


def single_expert(cfg: LEViTConfig) -> LEViT:
    """The model that `Finetune` trains: expert 0 of this configuration and seed, never another."""
    alone = dict(max_experts=1, gating="none", routing="vae", prior="none", calibration=False)
    return LEViT(dataclasses.replace(cfg, **alone))
