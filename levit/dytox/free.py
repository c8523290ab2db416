"""Task-free DyTox [D]: a token is added when the stream surprises the model, not when somebody says that a task ends.

Batches arrive one after another, without task labels, and are seen once. Before anything is learned from a batch, one
chart of rule `calibrated` (`levit.detector`, docs/expansion.md) takes in how surprising its labels are: their mean
cross-entropy over all classes, infinite where a class never came. Ranks are what the chart sums, so that infinity is
one more odd batch, not an alarm.

- An alarm means another source. If classes came with it, a *new token* is added, whose head has exactly these: the
  classes that came since the chart left zero and have no output yet. Without new classes there is nothing that a token
  could tell apart: the chart takes the new data for usual, and the model learns them as they are.
- Classes that came without an alarm, as in the first batches or by a rare image, join the head of the latest token.

Until then images of new classes wait; nothing is trained on them. All other images enter a memory of equally many
images of each class at once, and each update takes the arriving images and fills its batch from the memory. So every
update is balanced, which is what the fine-tuning is for when tasks are told; old tokens and heads learn along.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from levit.calibrated import label_surprise
from levit.checks import check_labels, check_values
from levit.detector import Chart
from levit.dytox.augment import crop_and_mirror, mix_up
from levit.dytox.free_model import FreeDyTox
from levit.dytox.learner import most_important, training_loss
from levit.dytox.rehearsal import Reservoir
from levit.learner import Event


class FreeDyToxLearner:
    """Drives a `FreeDyTox` over a stream, with the interface of `levit.Learner`.

    Args:
        model: whose configuration says how. Trained with AdamW at a constant rate, as nobody knows when a task ends;
            each change of the heads begins a new optimizer.
    """

    def __init__(self, model: FreeDyTox) -> None:
        self.model = model
        self.cfg = model.cfg
        self.updates_per_batch = self.cfg.updates_per_batch
        self.memory = Reservoir(self.cfg.memory_size)
        """By column of the heads."""
        self.chart = Chart(self.cfg.expansion_threshold)
        self.teacher: FreeDyTox | None = None
        """The model as it was before the latest token."""
        self.waiting: list[tuple[Tensor, Tensor]] = []
        """Images and labels of classes that have no output yet."""
        self.suspects: list[int] = []
        """Images of each batch since the chart left zero."""
        self.batches = 0
        self._start_optimizer()

    def observe(self, images: Tensor, labels: Tensor) -> Event:
        """Learn from one batch of the stream.

        Args:
            images: [b, C, S, S] in [0, 1] in the model's dtype, or uint8; b ≥ 1.
            labels: [b] int64 in 0..num_classes-1.

        Raises:
            ValueError, TypeError: bad input; model and learner are as they were.
            RuntimeError: the loss is not finite.
        """
        images = self._check(images, labels)
        known = self.model.columns(labels) >= 0
        statistic, alarm = self._look(images, labels)
        if not known.all():
            self.waiting.append((images[~known], labels[~known]))
        self._remember(images[known], labels[known], "arrive")
        expanded = alarm and bool(self.waiting)
        moved = sum(self.suspects[:-1]) if expanded else 0
        if expanded:
            self._expand()
        elif alarm:
            self.chart.adapt()
        elif not self.chart.suspect and self.waiting:
            self._learn_waiting(new_token=not self.model.num_tasks)
        if not self.chart.suspect:
            self.suspects = []
        loss = self._update(images, labels)
        self.batches += 1
        return Event(expanded, statistic, loss, max(0, self.model.num_tasks - 1), moved)

    @torch.no_grad()
    def surprise(self, images: Tensor, labels: Tensor) -> float:
        """`levit.calibrated.label_surprise` of labels [b] over all classes; infinite where one of them never came."""
        return label_surprise(self.model(images), labels)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped; plain types and tensors."""
        return {
            "model": self.model.state_dict(),
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
            "memory": self.memory.state_dict(),
            "chart": self.chart.state_dict(),
            "waiting": [list(batch) for batch in self.waiting],
            "suspects": list(self.suspects),
            "batches": self.batches,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.model.load_state_dict(state["model"])
        device = self.model.mean.device
        self.memory.load_state_dict(state["memory"])
        self.memory.classes = [own.to(device) for own in self.memory.classes]
        self.chart = Chart.from_state(self.cfg.expansion_threshold, state["chart"])
        self.waiting = [(images.to(device), labels.to(device)) for images, labels in state["waiting"]]
        self.suspects, self.batches = list(state["suspects"]), state["batches"]
        self.teacher = None
        if state["teacher"] is not None:
            self.teacher = FreeDyTox(self.cfg).to(self.model.tabs[0].norm1.weight)
            self.teacher.load_state_dict(state["teacher"])
            self.teacher.requires_grad_(False)
        self._start_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])

    def _look(self, images: Tensor, labels: Tensor) -> tuple[Tensor | None, bool]:
        """What the chart says of a batch: its sum, and whether that is an alarm; nothing of the very first batch."""
        if not self.model.num_tasks:
            return None, False
        alarm = self.chart.observe(self.surprise(images, labels))
        if self.chart.suspect:
            self.suspects.append(len(labels))
        return torch.tensor([self.chart.statistic]), alarm

    def _expand(self) -> None:
        """A new token for the classes that wait. What the memory holds of the latest token's is put in order."""
        if self.cfg.distillation:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        held = len(self.memory.classes)
        for c in range(max(0, held - self.model.classes_per_task[-1]), held):
            own = self.memory.classes[c]
            if len(own):
                self.memory.classes[c] = most_important(self.model, own, len(own), self._seed("order", c))
        self._learn_waiting(new_token=True)
        self.chart, self.suspects = Chart(self.chart.limit), []

    def _learn_waiting(self, new_token: bool) -> None:
        """The classes that wait get their outputs, in the order in which they came, and their images are learned."""
        images, labels = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.model.learn_labels(list(dict.fromkeys(labels.tolist())), new_token)
        self.waiting = []
        self._remember(images, labels, "waited")
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        self.model.requires_grad_(True)
        if self.cfg.freeze_old:
            for parameter in (*self.model.task_tokens[:-1], *self.model.head[:-1].parameters()):
                parameter.requires_grad_(False)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.cfg.learning_rate, weight_decay=self.cfg.weight_decay)

    def _remember(self, images: Tensor, labels: Tensor, occasion: str) -> None:
        generator = torch.Generator().manual_seed(self._seed(occasion))
        self.memory.offer(images, self.model.columns(labels), generator)

    def _update(self, images: Tensor, labels: Tensor) -> float | None:
        """`updates_per_batch` updates with the images whose classes have outputs; the mean loss, None: no images."""
        columns = self.model.columns(labels)
        images, columns = images[columns >= 0], columns[columns >= 0]
        losses = []
        for update in range(self.updates_per_batch):
            batch = self._batch(images, columns, update)
            if batch is None:
                return None
            loss = training_loss(self.model, self.teacher, *batch)
            if not torch.isfinite(loss):
                raise RuntimeError(f"the loss is {loss.item()} at batch {self.batches}; a lower learning_rate may help")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def _batch(self, images: Tensor, columns: Tensor, update: int) -> tuple[Tensor, Tensor] | None:
        """Images and targets of an update: a function of seed, batch, update and what the memory holds."""
        generator = torch.Generator().manual_seed(self._seed("update", update))
        missing = self.cfg.batch_size - len(images)
        if len(self.memory) and missing > 0:
            drawn = self.memory.draw(missing, generator)
            images, columns = torch.cat([images, drawn[0]]), torch.cat([columns, drawn[1]])
        if not len(images):
            return None
        classes = len(self.model.labels)
        if self.cfg.augment:
            images = crop_and_mirror(images, generator)
        if self.cfg.mixup and len(images) > 1:
            return mix_up(images, columns, self.cfg.mixup, classes, self._seed("mixup", update) % 2**32)
        return images, F.one_hot(columns, classes).to(images.dtype)

    def _seed(self, occasion: str, number: int = 0) -> int:
        kind = ("arrive", "waited", "order", "update", "mixup").index(occasion)
        state = np.random.SeedSequence((self.cfg.seed, 4, kind, self.batches, number)).generate_state(1, np.uint64)
        return int(state[0] >> 1)

    def _check(self, images: Tensor, labels: Tensor) -> Tensor:
        images = self.model.check_images(images)
        check_labels(images, labels)
        if not len(images):
            raise ValueError("images: expected at least one, got none")
        check_values(images, labels, self.cfg.num_classes, 0)
        return images
