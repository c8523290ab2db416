"""Algorithm 1: online, task-free learning of a stream, one batch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levit.calibrated import Batch, CalibratedRule, Change
from levit.checks import check_values
from levit.expansion import rule_fires
from levit.graph import CapturedStep
from levit.memory import Memory
from levit.reference import NO_LABEL, LEViT


@dataclass(frozen=True)
class Event:
    """What one `Learner.observe` did."""

    expanded: bool
    """Whether the active expert was frozen and a new one added."""
    distances: Tensor | None
    """What the rule looked at; None where it did not look. [K-1], D of equation 6 or reconstruction errors
    (`levit.expansion`); of rule `calibrated` [1], the larger sum of its charts."""
    loss: float | None
    """Mean training loss over this batch's updates; None: no update, the memory is too small or an expert recalled."""
    expert: int = 0
    """Whose data this batch is: of the expert that learns from it, or of one that was recalled (`calibrated`). What is
    suspect counts for the expert at work until an alarm says otherwise."""
    moved: int = 0
    """Images of the batches before that turned out to be that expert's too (a change is noticed late)."""


Callback = Callable[["Learner", Event], object]
"""What `Learner` calls: (learner, event); the result is ignored."""


class Learner:
    """Drives a model, fused or reference, over a stream without task labels (Algorithm 1 [P]).

    Args:
        model: `levit.LEViT` or `levit.reference.LEViT`. Its active expert is trained with Adam.
        updates_per_batch: Adam steps per observed batch; None takes the configuration's.
        on_batch: called with (learner, event) after every batch, when all is done.
        on_expansion: the same, after batches that added an expert only, before `on_batch`.
        graph: on a GPU, launch each Adam step as one CUDA graph, captured anew for every expert (`levit.graph`). The
            optimizer's settings are captured too.

    Raises:
        ValueError: `updates_per_batch` is no count, or `graph` without a CUDA device.
    """

    def __init__(
        self,
        model: LEViT,
        updates_per_batch: int | None = None,
        on_batch: Callback | None = None,
        on_expansion: Callback | None = None,
        graph: bool = False,
    ) -> None:
        cfg = model.cfg
        if updates_per_batch is not None and (not isinstance(updates_per_batch, int) or updates_per_batch < 1):
            raise ValueError(f"updates_per_batch: expected a whole number of at least 1, got {updates_per_batch!r}")
        if graph and not _on_gpu(model):
            raise ValueError(f"graph: graph=True needs a CUDA device, but the model is on {model.weight.device}")
        self.model = model
        self.cfg = cfg
        self.graph = graph
        self.updates_per_batch = updates_per_batch or cfg.updates_per_batch
        self.on_batch = on_batch
        self.on_expansion = on_expansion
        self.generator = torch.Generator().manual_seed(cfg.seed)
        shape = (cfg.channels, cfg.image_size, cfg.image_size)
        self.memory = Memory(cfg.memory_size, shape, like=model.weight)
        self.rule = CalibratedRule(cfg) if cfg.criterion == "calibrated" else None
        self._broken: str | None = None
        self._start_expert()

    def observe(self, images: Tensor, labels: Tensor | None = None) -> Event:
        """Learn from one batch of the stream.

        Args:
            images: [b, C, S, S] in [0, 1] in the model's dtype, or uint8; 1 ≤ b ≤ memory_size.
            labels: [b] int64 in 0..num_classes-1, -1 for an image without a label (it trains the VAE only); None: no
                image has one.

        Raises:
            ValueError, TypeError: bad input; the learner is as it was.
            RuntimeError: an earlier call failed half-way (out of memory, an interrupt): load a state first.
        """
        if self._broken:
            raise RuntimeError(
                f"learner: an earlier observe failed half-way ({self._broken}); load a saved state first"
            )
        if labels is None and isinstance(images, Tensor):
            labels = torch.full(images.shape[:1], NO_LABEL, device=images.device)
        images = self._check(images, labels)
        try:
            event = self._observe(images, labels)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        for callback in (self.on_expansion if event.expanded else None, self.on_batch):
            if callback is not None:
                callback(self, event)
        return event

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped: model, optimizer, memory, RNG; plain types and tensors."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": self.memory.state_dict(),
            "generator": self.generator.get_state(),
        } | ({} if self.rule is None else {"rule": self.rule.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit; one that does not fit raises `ValueError` and changes nothing."""
        needed = {"model", "optimizer", "memory", "generator"} | ({"rule"} if self.rule is not None else set())
        missing = needed - set(state)
        if missing:
            raise ValueError(f"state: {sorted(missing)[0]} is missing")
        before = None if self._broken else copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except BaseException as error:
            if before is not None:
                self._load(before)
            if isinstance(error, (KeyError, TypeError, RuntimeError, AttributeError)):
                raise ValueError(f"state: expected a state of this learner; {type(error).__name__}: {error}") from error
            raise
        self._broken = None

    def _observe(self, images: Tensor, labels: Tensor) -> Event:
        if self.rule is not None:
            return self._observe_calibrated(self.rule, images, labels)
        expert = self.model.num_experts - 1
        self.model.observe(images, labels, expert)
        self._store(images, labels)
        losses, distances = self._update(), self._distances()
        loss, fires = self._read(losses, distances)
        return Event(self._expand_or_drop(len(images), fires), distances, loss, expert)

    def _observe_calibrated(self, rule: CalibratedRule, images: Tensor, labels: Tensor) -> Event:
        """Rule `calibrated` looks before anything is learned from the batch, and may fire at any time."""
        before = expert = rule.expert_at_work(self.model)
        cleared, change = rule.observe(self.model, images, labels)
        statistic, expanded, moved = torch.tensor([rule.statistic]), False, 0
        self._learn(cleared, before)
        if change is not None:
            expanded = self._react(rule, change)
            expert = rule.expert_at_work(self.model)
            self._learn(change.batches, expert)
            moved = 0 if expert == before else sum(len(batch) for batch, _ in change.batches[:-1])
        loss = self._read(self._update(), None)[0] if rule.recalled is None else None
        return Event(expanded, statistic, loss, expert, moved)

    def _learn(self, batches: list[Batch], expert: int) -> None:
        """These batches are `expert`'s: for routing, and, unless it is frozen, for the memory that it trains on."""
        for images, labels in batches:
            self.model.observe(images, labels, expert)
            if expert == self.model.num_experts - 1:
                self._store(images, labels)

    def _react(self, rule: CalibratedRule, change: Change) -> bool:
        """The stream has another source: recall the expert that knows it, or add one; whether one was added."""
        limit = self.cfg.max_experts
        if change.expert is not None:
            rule.recall(change.expert, self.model)
        elif limit is not None and self.model.num_experts >= limit:
            rule.ignore()
        else:
            self._grow()
            rule.expand()
            return True
        return False

    @torch.no_grad()
    def _store(self, images: Tensor, labels: Tensor) -> None:
        self.cache.fill(self.memory.add(images, labels))

    def _update(self) -> list[Tensor]:
        """`updates_per_batch` Adam steps on minibatches drawn from the memory; their losses, none: too few images."""
        size = self.cfg.train_batch
        if len(self.memory) < size:
            return []
        return [
            self._step(self.memory.sample(size, self.generator), self.model.training_noise(size, self.generator))
            for _ in range(self.updates_per_batch)
        ]

    def _adam_step(self, rows: Tensor, noise: Tensor) -> Tensor:
        """One Adam step on these slots of the memory [B] with ε [B, L]; its loss."""
        images, labels = (x.index_select(0, rows) for x in (self.memory.images, self.memory.labels))
        loss = self.model.set_gradients(images, labels, self.cache.rows(rows), noise=noise)
        self.optimizer.step()
        return loss

    def _distances(self) -> Tensor | None:
        """What the rule looks at, once the memory is full; None where nothing is to be decided by it."""
        limit = self.cfg.max_experts
        experts = self.model.num_experts
        if not self.memory.full or experts == 1 or (limit is not None and experts >= limit):
            return None
        with torch.no_grad():
            return self.cache.statistic(self.generator)

    def _read(self, losses: list[Tensor], distances: Tensor | None) -> tuple[float | None, bool]:
        """Mean loss, and whether the rule fires, in one transfer: all that a step on a GPU waits for."""
        found = [torch.stack(losses).mean()[None]] if losses else []
        found += [] if distances is None else [distances]
        if not found:
            return None, False
        values, loss = torch.cat(found).cpu(), None
        if losses:
            loss, values = values[0].item(), values[1:]
            if not abs(loss) < float("inf"):
                raise RuntimeError(f"loss: expected a finite number, got {loss}; a lower learning_rate may help")
        return loss, distances is not None and rule_fires(values, self.cfg.expansion_threshold)

    def _expand_or_drop(self, batch: int, fires: bool) -> bool:
        """The last part of Algorithm 1, once the memory is full: grow, or make room for the next batch."""
        limit = self.cfg.max_experts
        if not self.memory.full or (limit is not None and self.model.num_experts >= limit):
            return False
        if self.model.num_experts > 1 and not fires:
            self.memory.drop_oldest(batch)
            return False
        self._grow()
        return True

    def _grow(self) -> None:
        """Freeze the active expert and begin another one, with an empty memory."""
        self.model.add_expert()
        self.memory.clear()
        self._start_expert()

    def _start_expert(self) -> None:
        """A new active expert gets a new optimizer, and the memory a cache of what the frozen ones say."""
        self.optimizer = self.model.new_optimizer(self.cfg.learning_rate)
        self.cache = self.model.new_cache(self.memory)
        self._prepare_steps()

    def _prepare_steps(self) -> None:
        """A graph belongs to one optimizer, whose own counters then have to live on the device."""
        for group in self.optimizer.param_groups:
            group["capturable"] = self.graph
        self._step = CapturedStep(self._adam_step) if self.graph else self._adam_step

    def _load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.memory.load_state_dict(state["memory"])
        if self.rule is not None:
            self.rule.load_state_dict(state["rule"])
        self._start_expert()
        self.optimizer.load_state_dict(state["optimizer"])
        self._prepare_steps()
        self.generator.set_state(state["generator"])
        with torch.no_grad():
            self.cache.refill()

    def _check(self, images: Tensor, labels: Tensor) -> Tensor:
        images = self.model.check_images(images)
        self.model.check_labels(images, labels)
        if not 1 <= len(images) <= self.memory.capacity:
            raise ValueError(f"images: expected 1 to {self.memory.capacity} (memory_size) of them, got {len(images)}")
        check_values(images, labels, self.cfg.num_classes, NO_LABEL)
        return images


def _on_gpu(model: LEViT) -> bool:
    return model.weight.is_cuda
