"""DyToxLearner: tasks one after another, each in steps, resumable between any two of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from levit.dytox.augment import crop_and_mirror, mix_up
from levit.dytox.losses import dytox_loss
from levit.dytox.model import DyTox
from levit.dytox.rehearsal import Rehearsal, herding

EMBEDDING_BATCH = 256


def training_loss(model: DyTox, teacher: DyTox | None, images: Tensor, targets: Tensor) -> Tensor:
    """What a task is trained with: images [B, C, S, S], targets [B, classes] in the order of the heads' outputs."""
    old = None
    if teacher is not None:
        with torch.no_grad():
            old, _ = teacher.training_outputs(images)
    logits, divergence = model.training_outputs(images)
    return dytox_loss(logits, targets, old, divergence, model.cfg.divergence, model.cfg.temperature)


@torch.no_grad()
def most_important(model: DyTox, images: Tensor, count: int, seed: int) -> Tensor:
    """Of a class's images [n, C, S, S] the `count` to keep (`DyToxConfig.rehearsal`), the most important first."""
    if model.cfg.rehearsal == "random":
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]
    else:
        parts = images.split(EMBEDDING_BATCH)
        said = [model.embeddings(part.to(model.mean.device)).flatten(1) for part in parts]  # by all tokens
        order = herding(torch.cat(said), count)
    return images[order.to(images.device)]


class DyToxLearner:
    """Trains a `DyTox` on one task after another.

    ```
    for images, labels, classes in tasks:
        learner.begin_task(images, labels, classes)
        while (loss := learner.step()) is not None:
            ...
    ```

    A task is trained with its images and the memory; then its images enter the memory, and from the second task on the
    model is fine-tuned on the memory alone, equally many images of each class, with the encoder frozen.

    Args:
        model: whose configuration says how.
    """

    def __init__(self, model: DyTox) -> None:
        self.model = model
        self.cfg = model.cfg
        self.memory = Rehearsal(self.cfg.memory_size)
        self.teacher: DyTox | None = None
        """The model as it was before this task."""
        self.phase: str | None = None
        """`train`, `finetune`, or None between tasks."""
        self.done = 0
        """Steps of this phase."""
        self._new: tuple[Tensor, Tensor] | None = None

    @property
    def total(self) -> int:
        """Steps of this phase altogether."""
        epochs = self.cfg.epochs if self.phase == "train" else self.cfg.finetune_epochs
        return epochs * self._steps_per_epoch

    @property
    def share_done(self) -> float:
        """Of the task's training, by its updates, 0 to 1; the fine-tuning comes after that."""
        return self.done / self.total if self.phase == "train" else 1.0

    def begin_task(self, images: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take on a task.

        Args:
            images: [n, C, S, S], uint8, or floating in [0, 1] in the model's dtype; n ≥ 1.
            labels: [n] int64, the next `num_classes` numbers after those of the tasks before.
            num_classes: of the task.

        Raises:
            ValueError, TypeError: bad input; model and learner are as they were.
            RuntimeError: the task before is not done.
        """
        if self.phase is not None:
            raise RuntimeError("begin_task: the task before is not done; call step() until it returns None")
        self._check_task(images, labels, num_classes)
        teaches = self.cfg.distillation and self.model.num_tasks > 0
        self.teacher = copy.deepcopy(self.model).requires_grad_(False) if teaches else None
        self.model.add_task(num_classes)
        self._new = images, labels
        self._start("train")

    def step(self) -> float | None:
        """One update; its loss, or None where the task is done."""
        if self.phase is None:
            return None
        if self.done == self.total:
            self._next_phase()
            return self.step()
        loss = self._loss(*self._batch())
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss.item()} in step {self.done} of phase {self.phase}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return loss.item()

    def learning_rate(self) -> float:
        """Of the coming step: a linear rise over the warm-up, then a cosine; in the fine-tuning it stays."""
        if self.phase == "finetune":
            return self.cfg.finetune_learning_rate
        warm = min(self.cfg.warmup_epochs * self._steps_per_epoch, self.total // 2)
        if self.done < warm:
            return self.cfg.learning_rate * (self.done + 1) / warm
        return self.cfg.learning_rate * 0.5 * (1 + math.cos(math.pi * (self.done - warm) / (self.total - warm)))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on but the images of the task at hand; plain types and tensors."""
        return {
            "model": self.model.state_dict(),
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
            "memory": self.memory.state_dict(),
            "phase": self.phase,
            "done": self.done,
            "optimizer": None if self.phase is None else self.optimizer.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], images: Tensor | None = None, labels: Tensor | None = None
    ) -> None:
        """Go on from a saved state; within a task its images and labels are needed again, those of `begin_task`."""
        if state["phase"] is not None and images is None:
            raise ValueError("state: it is from within a task; pass that task's images and labels")
        self.model.load_state_dict(state["model"])
        self.memory.load_state_dict(state["memory"])
        self.teacher = None
        if state["teacher"] is not None:
            self.teacher = DyTox(self.cfg).to(self.model.tabs[0].norm1.weight)
            self.teacher.load_state_dict(state["teacher"])
            self.teacher.requires_grad_(False)
        self._new = None if images is None else (images, labels)
        self.phase = None
        if state["phase"] is not None:
            self._start(state["phase"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done = state["done"]

    def _check_task(self, images: Tensor, labels: Tensor, num_classes: int) -> None:
        model, old = self.model, sum(self.model.classes_per_task)
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
            raise ValueError(f"num_classes: expected a whole number of at least 1, got {num_classes!r}")
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
            raise TypeError(f"labels: expected torch.int64, got {getattr(labels, 'dtype', type(labels).__name__)}")
        model.check_images(images[:0].to(model.mean.device) if isinstance(images, Tensor) else images)
        if images.is_floating_point() and len(images) and not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"images: expected [0, 1], got {images.min():g} to {images.max():g}")
        if labels.shape != images.shape[:1] or not len(images):
            raise ValueError(
                f"labels: expected [{len(images)}], one per image and at least one, got {list(labels.shape)}"
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= old + num_classes:
            raise ValueError(f"labels: expected {old} to {old + num_classes - 1}, the task's own, got {low} to {high}")
        if low < old:
            raise ValueError(
                f"labels: class {low} belongs to an earlier task; images of old classes come from the memory"
            )

    def _start(self, phase: str) -> None:
        """Pool, trainable parameters and optimizer of a phase."""
        self.phase, self.done = phase, 0
        if phase == "finetune":
            self.images, self.labels = self.memory.all()
        elif len(self.memory):
            self.images, self.labels = (torch.cat(x) for x in zip(self.memory.all(), self._new, strict=True))
        else:
            self.images, self.labels = self._new
        self._steps_per_epoch = -(-len(self.images) // self.cfg.batch_size)
        self.model.requires_grad_(True)
        frozen: list[torch.nn.Parameter] = []
        if phase == "finetune":
            frozen += self.model.encoder_parameters()
        elif self.cfg.freeze_old:
            frozen += [*self.model.task_tokens[:-1], *self.model.head[:-1].parameters()]
        for parameter in frozen:
            parameter.requires_grad_(False)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.cfg.learning_rate, weight_decay=self.cfg.weight_decay)

    def _next_phase(self) -> None:
        if self.phase == "train":
            if self.cfg.memory_size:
                self._remember()
            if len(self.memory) and self.model.num_tasks > 1 and self.cfg.finetune_epochs:
                self._start("finetune")
                return
        self.phase = self._new = self.teacher = None

    def _remember(self) -> None:
        images, labels = self._new
        classes, old = sum(self.model.classes_per_task), len(self.memory.classes)
        count, chosen = self.memory.per_class(classes), []
        for c in range(old, classes):
            chosen.append(most_important(self.model, images[labels == c], count, self._seed("memory", c)))
        self.memory.add(chosen)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Images and targets of the coming step: a function of seed, task, phase and step."""
        epoch, index = divmod(self.done, self._steps_per_epoch)
        generator = torch.Generator().manual_seed(self._seed(self.phase, epoch))
        order = torch.randperm(len(self.images), generator=generator)
        rows = order[index * self.cfg.batch_size : (index + 1) * self.cfg.batch_size]
        device = self.model.mean.device
        images, labels = self.model.check_images(self.images[rows].to(device)), self.labels[rows].to(device)
        classes = sum(self.model.classes_per_task)
        if self.cfg.augment:
            generator.manual_seed(self._seed(self.phase, epoch, index))
            images = crop_and_mirror(images, generator)
        if self.cfg.mixup and len(images) > 1:
            return mix_up(images, labels, self.cfg.mixup, classes, self._seed(self.phase, epoch, index, 1) % 2**32)
        return images, F.one_hot(labels, classes).to(images.dtype)

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        if self.phase == "finetune":
            return dytox_loss(self.model(images), targets)
        return training_loss(self.model, self.teacher, images, targets)

    def _seed(self, phase: str, *numbers: int) -> int:
        kind = {"train": 1, "finetune": 2, "memory": 3}[phase]
        state = np.random.SeedSequence((self.cfg.seed, self.model.num_tasks, kind, *numbers)).generate_state(
            1, np.uint64
        )
        return int(state[0] >> 1)
