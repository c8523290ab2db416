"""One run: a method over a stream, evaluated, logged, checkpointed; resumable at any batch."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from levit import metrics
from levit.config import LEViTConfig
from levit.learner import Event
from levit.methods import METHODS, StreamLearner
from levit.progress import Progress
from levit.record import check_same, description, peak_device_memory, peak_memory
from levit.runs import MetricsLog, RunDirectory, RunError
from levit.streams import Stream, configured_dataset
from levit.streams.stream import Augment, Normalize


class Interrupted(Exception):
    """The run was asked to stop (SIGINT, SIGTERM) and has saved its checkpoint."""


@dataclass(frozen=True)
class RunOptions:
    """What shapes a run beside its `LEViTConfig`. A resumed run must have the same."""

    method: Literal["levit", "reference", "finetune", "slda"] = "levit"
    """LEViT; the same in plain torch; the floor, one expert trained on the arriving images alone; or a streaming LDA
    without any expert."""
    limit: int | None = None
    """Images of the stream, of each experience in proportion; None means all."""
    test_limit: int | None = None
    """Test images, of each experience in proportion; None means all. Routing by convolutional VAEs is slow on a CPU."""
    eval_every: int = 1
    """Evaluate at the end of every n-th experience; always after the last."""
    log_every: int | None = None
    """Images between rows of metrics.csv, None a hundredth of the stream; expansions and evaluations get their own."""
    checkpoint_every: int = 10000
    """Images between checkpoints, at most."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints, at most: slow streams are saved by the clock."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("eval_every", "log_every", "checkpoint_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not self.checkpoint_minutes > 0:
            raise ValueError(f"checkpoint_minutes: expected more than 0, got {self.checkpoint_minutes}")


class RowLog(Protocol):
    """What gets the rows of metrics.csv: `levit.runs.MetricsLog`, `levit.report.tensorboard`."""

    def append(self, row: Mapping[str, float | None]) -> None: ...

    def close(self) -> None: ...


class Display(Protocol):
    """Who watches a run: see `levit.report.progress`."""

    def batch(self, progress: Progress, event: Event, experts: int) -> None: ...

    def evaluated(self, progress: Progress, experience: int, experts: int) -> None: ...

    def say(self, text: str) -> None: ...


def build_stream(
    cfg: LEViTConfig,
    options: RunOptions,
    data_dir: str | None = None,
    download: bool = False,
    augment: Augment | None = None,
    normalize: Normalize | None = None,
) -> Stream:
    """The stream of a run; `ValueError` where the method could do nothing with it. Hooks: `levit.streams.Stream`."""
    data = configured_dataset(cfg, data_dir, download)
    stream = Stream.from_config(cfg, data, options.limit, options.test_limit, augment, normalize)
    waits = METHODS[options.method].uses_memory and cfg.max_experts != 1 and cfg.criterion != "calibrated"
    if waits and len(stream) < cfg.memory_size:
        raise ValueError(
            f"memory_size: the stream has {len(stream)} images, the memory holds {cfg.memory_size} and would never "
            f"be full, so no expert would ever be added; pass --memory-size {max(1, len(stream) // 5)} or less"
        )
    return stream


def train(
    run: RunDirectory,
    cfg: LEViTConfig,
    options: RunOptions,
    stream: Stream,
    display: Display,
    *,
    preset: str,
    device: str = "cpu",
    command: str = "",
    resume: bool = False,
    logs: Sequence[Callable[[RunDirectory, int], RowLog]] = (),
    build: Callable[..., Training] | None = None,
) -> dict[str, Any]:
    """Run a method over a stream once, into a run directory; returns what results.json holds.

    Args:
        run: a new directory, or with `resume` one whose run goes on from its checkpoint, as if never stopped.
        preset, command: for the record.
        logs: what else gets every row of metrics.csv; each is made of the run and of the position that it starts from.
        build: makes the `Training` of another family of methods (`levit.families`), as `build_levit_training` does.

    Raises:
        RunError: the directory cannot be used, or a file could not be written; earlier files are as they were.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was saved.
    """
    with run.lock():
        if run.finished and resume:
            return run.read_results()
        if run.exists and not resume:
            what = "a finished run" if run.finished else "an unfinished run (--resume goes on with it)"
            raise RunError(f"{run.path}: holds {what}; choose another --out")
        config = description(cfg, options, stream, preset, command)
        if run.exists:
            check_same(run, config)
        training = (build or build_levit_training)(run, cfg, options, config, stream, device, logs)
        if run.exists:
            training.restore()
        else:
            run.write_config(config)
            run.write_stream(stream.record())
        training.go(display)
        results = training.results()
        run.write_results(results)
        return results


@dataclass
class Training:
    """A method on its way through a stream."""

    run: RunDirectory
    options: RunOptions
    config: dict[str, Any]
    """What config.json holds."""
    stream: Stream
    model: nn.Module
    learner: StreamLearner
    device: str
    logs: Sequence[Callable[[RunDirectory, int], RowLog]] = ()
    progress: Progress = field(default_factory=Progress)

    def go(self, display: Display) -> None:
        """From where the progress stands to the end of the stream."""
        stream, model, progress = self.stream, self.model, self.progress
        threshold = model.cfg.expansion_threshold
        log_every = self.options.log_every or max(1, len(stream) // 100)
        saved, saved_at = progress.position, time.monotonic()
        with stop_requests(display) as stop_requested, contextlib.ExitStack() as open_logs:
            logs = [
                open_logs.enter_context(contextlib.closing(log(self.run, saved))) for log in (MetricsLog, *self.logs)
            ]
            clock = time.perf_counter()
            for images, labels in stream.batches(start=saved):
                event = self.observe(images, labels)
                progress.seconds += time.perf_counter() - clock
                here = slice(progress.position, progress.position + len(labels))
                moved = stream.kinds[here.start - event.moved : here.start]
                progress.count_kinds(stream.kinds[here], moved, event.expert, stream.num_kinds)
                progress.count(event, len(labels), self.learner.updates_per_batch)
                display.batch(progress, event, model.num_experts)

                experience = self.evaluate_if_due()
                if experience is not None:
                    display.evaluated(progress, experience, model.num_experts)
                last = progress.position == len(stream)
                if last or event.expanded or experience is not None or progress.crossed(log_every, len(labels)):
                    row = progress.row(model.num_experts, threshold, experience is not None)
                    for log in logs:
                        log.append(row)
                due = progress.position - saved >= self.options.checkpoint_every
                late = time.monotonic() - saved_at >= 60 * self.options.checkpoint_minutes
                if last or stop_requested() or due or late:
                    self.save()
                    saved, saved_at = progress.position, time.monotonic()
                if stop_requested() and not last:
                    where = f"image {progress.position} of {len(stream)}"
                    raise Interrupted(f"{self.run.path}: stopped and saved at {where}; --resume goes on from there")
                clock = time.perf_counter()

    def observe(self, images: Tensor, labels: Tensor) -> Event:
        """One batch; a learner that fails (diverges, runs out of memory) ends the run, its checkpoint kept."""
        try:
            return self.learner.observe(images.to(self.device), labels.to(self.device))
        except RuntimeError as error:
            where = f"{self.run.path}: failed at image {self.progress.position}"
            raise RunError(f"{where} ({error}); the latest checkpoint is kept; LEVIT_DEBUG=1 shows more") from error

    def evaluate_if_due(self) -> int | None:
        """Add the matrix rows of the experiences that end at or before this position; the last one evaluated."""
        progress, ends = self.progress, self.stream.ends
        evaluated = None
        while len(progress.matrix) < len(ends) and ends[len(progress.matrix)] <= progress.position:
            experience = len(progress.matrix)
            if (experience + 1) % self.options.eval_every and experience + 1 < len(ends):
                progress.matrix.append(None)
                continue
            start = time.perf_counter()
            test = self.stream.test
            predicted, chosen = metrics.answers(self.model, test.images, self.device)
            progress.accuracy = metrics.accuracy(predicted, test.labels)
            if self.model.num_experts > 1:
                progress.route_accuracy = metrics.route_accuracy(chosen, test.kinds, progress.seen)
            progress.matrix.append(metrics.accuracy_by_experience(predicted, test.labels, test.experience, len(ends)))
            progress.evaluation_seconds += time.perf_counter() - start
            evaluated = experience
        return evaluated

    def save(self) -> None:
        """Write the checkpoint."""
        state = {"progress": dataclasses.asdict(self.progress), "learner": self.learner.state_dict()}
        self.run.save_checkpoint(self._identity() | state)

    def restore(self) -> None:
        """Load the checkpoint, where there is one; `RunError` where it is another run's."""
        state = self.run.load_checkpoint()
        if state is None:
            return
        path = self.run / "checkpoint.pt"
        for part, value in self._identity().items():
            if state.get(part) != value:
                raise RunError(f"{path}: {part} differs from config.json, it is another run's; nothing was changed")
        try:
            self.load_learner(state["learner"])
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunError(f"{path}: does not fit this model ({error}); nothing was changed") from error

    def load_learner(self, state: dict[str, Any]) -> None:
        """Go on from the learner's part of a checkpoint."""
        self.learner.load_state_dict(state)

    def results(self) -> dict[str, Any]:
        """What results.json holds; accuracies from 0 to 1."""
        progress, images = self.progress, len(self.stream)
        matrix = [row or [float("nan")] * len(self.stream.ends) for row in progress.matrix]
        return {
            "preset": self.config["preset"],
            "method": self.options.method,
            "seed": self.config["config"]["seed"],
            "commit": self.config["commit"],
            "final_accuracy": progress.accuracy,
            "route_accuracy": progress.route_accuracy,
            **metrics.summary(matrix),
            "accuracy_matrix": progress.matrix,
            "num_experts": self.model.num_experts,
            "expansions": progress.expansions,
            "seen": progress.seen,
            "images": images,
            "limit": self.options.limit,
            "test_images": len(self.stream.test),
            "updates_per_sample": progress.updates / images,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": progress.seconds,
            "evaluation_seconds": progress.evaluation_seconds,
            "seconds_per_thousand_images": 1000 * progress.seconds / images,
            "samples_per_second": images / progress.seconds,
            "peak_memory_mib": peak_memory(),
            "peak_device_memory_mib": peak_device_memory(self.device),
            "device": self.device,
            "threads": torch.get_num_threads(),
        }

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that loads it."""
        return {
            "config": self.config["config"],
            "options": self.config["options"],
            "stream": self.config["stream"]["sha256"],
        }


def build_levit_training(
    run: RunDirectory,
    cfg: LEViTConfig,
    options: RunOptions,
    config: dict[str, Any],
    stream: Stream,
    device: str,
    logs: Sequence[Callable[[RunDirectory, int], RowLog]],
) -> Training:
    """A method of `levit.methods` at the beginning of its stream; `config` is what config.json holds."""
    model, learner = METHODS[options.method].build(cfg, device)
    return Training(run, options, config, stream, model, learner, device, logs)


@contextlib.contextmanager
def stop_requests(display: Display) -> Iterator[Any]:
    """Turn the first SIGINT or SIGTERM into a flag that the loop reads between batches; a second one stops at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def handle(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        display.say("Stopping after this batch; a second Ctrl-C stops at once and falls back to the last checkpoint.")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
