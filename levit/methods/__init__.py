"""The learners that a command can name. Each pairs a model with the thing that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from levit import reference
from levit.config import LEViTConfig
from levit.learner import Event, Learner
from levit.methods.finetune import Finetune, single_expert
from levit.methods.slda import SLDA, SLDALearner
from levit.model import LEViT


class StreamLearner(Protocol):
    """What a run needs of a learner: `levit.Learner`'s interface."""

    updates_per_batch: int

    def observe(self, images: Tensor, labels: Tensor) -> Event: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Method:
    """How to build a method's model and learner."""

    model: Callable[[LEViTConfig], nn.Module]
    learner: Callable[..., StreamLearner]
    uses_memory: bool

    def build(self, cfg: LEViTConfig, device: torch.device | str = "cpu") -> tuple[nn.Module, StreamLearner]:
        """A fresh model on `device` and its learner."""
        model = self.model(cfg).to(device)
        return model, self.learner(model)


METHODS: dict[str, Method] = {
    "levit": Method(LEViT, Learner, uses_memory=True),
    "reference": Method(reference.LEViT, Learner, uses_memory=True),
    "finetune": Method(single_expert, Finetune, uses_memory=False),
    "slda": Method(SLDA, SLDALearner, uses_memory=False),
}
"""`levit` is fused, `reference` the same mathematics in plain torch, `finetune` the floor, `slda` a closed form."""
