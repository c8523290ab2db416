"""Families of methods: what a run of each is configured by, streams, and trains with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from levit import dytox
from levit.arguments import parse_train
from levit.config import PRESETS, LEViTConfig
from levit.dytox.arguments import parse_dytox
from levit.dytox.config import PRESETS as DYTOX_PRESETS
from levit.dytox.run import build_model, build_training
from levit.dytox.stream import task_stream
from levit.methods import METHODS
from levit.streams import Stream, configured_dataset
from levit.train import build_levit_training, build_stream


@dataclass(frozen=True)
class Family:
    """One family; a preset's name tells which."""

    config: type[Any]
    presets: dict[str, dict[str, Any]]
    parse: Callable[..., Any]
    """(preset, arguments, stored config.json) → what `levit train` was given."""
    run_stream: Callable[..., Stream]
    """(configuration, options, data_dir, download) → the stream of a run."""
    test_stream: Callable[..., Stream]
    """(configuration, data, test_limit=…) → the same order of classes, for its test set."""
    model: Callable[[Any, str], nn.Module]
    """(configuration, method) → a fresh model."""
    training: Callable[..., Any]
    """See `levit.train.build_levit_training`."""
    protocol: str
    """What its learners are shown and told, in a few words."""
    borders: str
    """What the ends of a stream's experiences are to its learners."""


def _task_stream(cfg: dytox.DyToxConfig, options: Any, data_dir: str | None, download: bool) -> Stream:
    batch = cfg.stream_batch if options.method == "dytox-free" else None
    return task_stream(cfg, configured_dataset(cfg, data_dir, download), options.limit, options.test_limit, batch)


LEVIT = Family(
    LEViTConfig,
    PRESETS,
    parse_train,
    build_stream,
    Stream.from_config,
    lambda cfg, method: METHODS[method].model(cfg),
    build_levit_training,
    "one pass, no task labels",
    "changes, which the learner is not told",
)
DYTOX = Family(
    dytox.DyToxConfig,
    DYTOX_PRESETS,
    parse_dytox,
    _task_stream,
    task_stream,
    build_model,
    build_training,
    "many passes over each task, whose end is told; no task labels in predictions",
    "ends of tasks",
)

DYTOX_FREE = dataclasses.replace(DYTOX, protocol=LEVIT.protocol, borders=LEVIT.borders)
"""The same presets, of the method that is not told of tasks."""

ALL_PRESETS = PRESETS | DYTOX_PRESETS


def family_of(preset: str, method: str | None = None) -> Family:
    """The family of a preset and method; a name that is no preset's is taken for LEViT's."""
    if preset not in DYTOX_PRESETS:
        return LEVIT
    return DYTOX_FREE if method == "dytox-free" else DYTOX
