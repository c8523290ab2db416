"""FreeDyTox: a DyTox that gets to know classes as they come, in any order, and whose latest head may grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levit.dytox.config import DyToxConfig
from levit.dytox.model import Classifier, DyTox, new_classifier
from levit.dytox.official import saved_classes


class FreeDyTox(DyTox):
    """A `DyTox` whose outputs are labels, 0 to num_classes - 1; one that never came has logit -inf, probability 0.

    The heads have a column per class, in the order in which classes came (`labels`). `training_outputs` gives columns.
    """

    def __init__(self, cfg: DyToxConfig) -> None:
        super().__init__(cfg)
        self.register_buffer("labels", torch.empty(0, dtype=torch.int64), persistent=False)
        """[classes] the label of each column."""

    def forward(self, images: Tensor) -> Tensor:
        """images [B, C, S, S], uint8 or in [0, 1] → logits [B, num_classes]."""
        columns = super().forward(images)
        logits = columns.new_full((len(images), self.cfg.num_classes), float("-inf"))
        logits[:, self.labels] = columns
        return logits

    def columns(self, labels: Tensor) -> Tensor:
        """[b] labels → [b] their columns, -1 for a label that has none."""
        table = labels.new_full((self.cfg.num_classes,), -1)
        table[self.labels] = torch.arange(len(self.labels), device=labels.device)
        return table[labels]

    def learn_labels(self, labels: Sequence[int], new_token: bool) -> None:
        """Columns for labels that have none: in the head of the latest token, or of a new one."""
        known = len(self.labels)
        if new_token:
            self.add_task(len(labels))
        else:
            state = np.random.SeedSequence((self.cfg.seed, self.num_tasks, known)).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(state[0] >> 1))
            self.head[-1] = _grown(self.head[-1], len(labels), generator)
            if self.head_div is not None:
                self.head_div = _grown(self.head_div, len(labels), generator)
        self.labels = torch.cat([self.labels, torch.tensor(labels, device=self.labels.device)])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As DyTox's, and `labels`."""
        return super().state_dict(*args, **kwargs) | {"labels": self.labels.clone()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As DyTox's; the model takes on the saved labels too."""
        known = sum(saved_classes(state)[0])
        labels = state.get("labels")
        if labels is None or labels.shape != (known,):
            got = "none" if labels is None else list(labels.shape)
            raise ValueError(f"state_dict: labels: expected [{known}], one per column of the heads, got {got}")
        loaded = super().load_state_dict({k: v for k, v in state.items() if k != "labels"}, strict, assign)
        self.labels = labels.clone().to(self.labels.device)
        return loaded

    def _expected_shapes(self, classes: list[int], divergence: int | None) -> dict[str, tuple[int, ...]]:
        shapes = super()._expected_shapes(classes, divergence)
        del shapes["labels"]
        return shapes

    def _task_of_output(self) -> Tensor:
        tasks = self.labels.new_zeros(self.cfg.num_classes)
        tasks[self.labels] = super()._task_of_output()
        return tasks


@torch.no_grad()
def _grown(classifier: Classifier, count: int, generator: torch.Generator) -> Classifier:
    """The same with `count` more outputs behind the others."""
    head = classifier.head
    new = new_classifier(head.in_features, head.out_features + count, generator).to(head.weight)
    new.norm.load_state_dict(classifier.norm.state_dict())
    new.head.weight[: head.out_features] = head.weight
    new.head.bias[: head.out_features] = head.bias
    return new
