"""A DyTox run, in the run directory, with the metrics and the resuming of every other run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from levit.dytox.config import DyToxConfig
from levit.dytox.free import FreeDyToxLearner
from levit.dytox.free_model import FreeDyTox
from levit.dytox.learner import DyToxLearner
from levit.dytox.model import DyTox
from levit.learner import Event
from levit.runs import MetricsLog, RunDirectory, RunError
from levit.streams import Stream
from levit.train import Display, Interrupted, RowLog, Training, stop_requests

METHODS: dict[str, dict[str, Any]] = {
    "dytox": {},
    "finetune": dict(memory_size=0, finetune_epochs=0, distillation=False, divergence=0.0, freeze_old=False),
    "dytox-free": dict(freeze_old=False),
}
"""By name: fields that differ from the configuration's. `finetune` is the floor: the same network, and nothing else.
`dytox-free` has no fine-tuning in which old tokens and heads could follow the encoder, so they always learn."""

ROWS_PER_TASK = 20


@dataclass(frozen=True)
class TaskOptions:
    """What shapes a run beside its `DyToxConfig`. A resumed run must have the same."""

    method: Literal["dytox", "finetune", "dytox-free"] = "dytox"
    """DyTox; the floor, the same network trained on each task's images alone, without memory or distillation; or
    task-free: one pass over the stream, and a token when an alarm of rule `calibrated` comes with new classes."""
    limit: int | None = None
    """Training images, of each task in proportion; None means all."""
    test_limit: int | None = None
    """Test images, of each task in proportion; None means all."""
    eval_every: int = 1
    """Evaluate at the end of every n-th task; always after the last."""
    checkpoint_every: int = 500
    """Updates between checkpoints; there is one at the end of each task too. Of dytox-free: images, and at its end."""
    checkpoint_minutes: float = 5.0
    """Of dytox-free: minutes between checkpoints, at most."""
    log_every: int | None = None
    """Of dytox-free: images between rows of metrics.csv, None a hundredth of the stream."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("eval_every", "checkpoint_every", "log_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not self.checkpoint_minutes > 0:
            raise ValueError(f"checkpoint_minutes: expected more than 0, got {self.checkpoint_minutes}")


def build_model(cfg: DyToxConfig, method: str) -> DyTox:
    """The model of a method, without a task."""
    return (FreeDyTox if method == "dytox-free" else DyTox)(dataclasses.replace(cfg, **METHODS[method]))


def build_training(
    run: RunDirectory,
    cfg: DyToxConfig,
    options: TaskOptions,
    config: dict[str, Any],
    stream: Stream,
    device: str,
    logs: Sequence[Callable[[RunDirectory, int], RowLog]],
) -> Training:
    """For `levit.train.train`."""
    model = build_model(cfg, options.method).to(device)
    if isinstance(model, FreeDyTox):
        return FreeTraining(run, options, config, stream, model, FreeDyToxLearner(model), device, logs)
    return TaskTraining(run, options, config, stream, model, DyToxLearner(model), device, logs)


class TaskTraining(Training):
    """A learner on its way through the tasks of a stream.

    Where it stands is counted in images of the stream, as in any run: of a task's images as many are behind it as the
    share of its updates that is done.
    """

    def go(self, display: Display) -> None:
        """From where the progress stands to the end of the last task."""
        with stop_requests(display) as stop_requested, contextlib.ExitStack() as open_logs:
            logs = [
                open_logs.enter_context(contextlib.closing(log(self.run, self.progress.position)))
                for log in (MetricsLog, *self.logs)
            ]
            while self.progress.position < len(self.stream):
                if self.learner.phase is None:
                    self.begin_task()
                for event in self.updates():
                    display.batch(self.progress, event, self.model.num_tasks)
                    if self.progress.position >= self.progress.row_position + self.task_size() / ROWS_PER_TASK:
                        self.write_row(logs, evaluated=False)
                    if stop_requested() or self.progress.updates % self.options.checkpoint_every == 0:
                        self.save()
                    if stop_requested():
                        raise Interrupted(
                            f"{self.run.path}: stopped and saved in task {self.model.num_tasks} of "
                            f"{len(self.stream.ends)}; --resume goes on from there"
                        )
                self.progress.position = self.stream.ends[self.model.num_tasks - 1]
                experience = self.evaluate_if_due()
                if experience is not None:
                    display.evaluated(self.progress, experience, self.model.num_tasks)
                self.write_row(logs, evaluated=experience is not None)
                self.save()

    def begin_task(self) -> None:
        """Give the learner the next task."""
        task, progress = self.model.num_tasks, self.progress
        if task:
            progress.expansions.append(progress.position)
        images, labels = self.task_data(task)
        kinds = self.stream.kinds[self.task_slice(task)]
        progress.count_kinds(kinds, kinds[:0], task, self.stream.num_kinds)
        self.learner.begin_task(images, labels, len(self.stream.experiences[task]))

    def updates(self) -> Any:
        """The updates of the task at hand, one after another, as events."""
        progress, task = self.progress, self.model.num_tasks - 1
        start = self.task_slice(task).start
        while True:
            clock = time.perf_counter()
            try:
                loss = self.learner.step()
            except RuntimeError as error:
                where = f"{self.run.path}: failed in task {task + 1}"
                raise RunError(f"{where} ({error}); the latest checkpoint is kept; LEVIT_DEBUG=1 shows more") from error
            progress.seconds += time.perf_counter() - clock
            if loss is None:
                return
            progress.updates += 1
            progress.losses.append(loss)
            behind = int(self.learner.share_done * self.task_size())
            progress.position = start + min(behind, self.task_size() - 1)
            yield Event(expanded=False, distances=None, loss=loss)

    def write_row(self, logs: Sequence[RowLog], evaluated: bool) -> None:
        """One row of metrics.csv."""
        row = self.progress.row(self.model.num_tasks, 0.0, evaluated)
        for log in logs:
            log.append(row)

    def load_learner(self, state: dict[str, Any]) -> None:
        """A state from within a task needs the images of that task."""
        tasks = sum(key.startswith("task_tokens.") for key in state["model"])
        data = self.task_data(tasks - 1) if state["phase"] is not None else ()
        self.learner.load_state_dict(state, *data)

    def results(self) -> dict[str, Any]:
        """As any run's, with `seen_accuracy`."""
        return super().results() | seen_accuracy(self.progress.matrix, self.stream)

    def task_slice(self, task: int) -> slice:
        """Positions of a task's images in the stream."""
        ends = self.stream.ends
        return slice(ends[task - 1] if task else 0, ends[task])

    def task_size(self) -> int:
        """Images of the task at hand."""
        here = self.task_slice(self.model.num_tasks - 1)
        return here.stop - here.start

    def task_data(self, task: int) -> tuple[Tensor, Tensor]:
        """A task's images, as bytes where a byte is a 255th, and what the learner is told of them."""
        here, images = self.task_slice(task), self.stream.images
        bytes_do = images.data.scale == 255 and images.normalize is None
        pixels = torch.from_numpy(images.pixels[images.rows[here]]) if bytes_do else images[here]
        return pixels, torch.from_numpy(self.stream.labels[here])


class FreeTraining(Training):
    """A task-free learner on its way through a stream, batch by batch."""

    def results(self) -> dict[str, Any]:
        """As any run's, with `seen_accuracy`."""
        return super().results() | seen_accuracy(self.progress.matrix, self.stream)


def seen_accuracy(matrix: Sequence[Sequence[float] | None], stream: Stream) -> dict[str, Any]:
    """Accuracy on the classes seen so far at the end of each experience, and its mean."""
    counts = np.bincount(stream.test.experience, minlength=len(stream.ends))
    seen = [
        None if row is None else float(np.average(row[: i + 1], weights=counts[: i + 1]))
        for i, row in enumerate(matrix)
    ]
    known = [value for value in seen if value is not None]
    return {"seen_accuracy": seen, "average_incremental_accuracy": sum(known) / len(known)}
