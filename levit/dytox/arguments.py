"""What `levit train dytox-…` can be given."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from levit.dytox.config import PRESETS, DyToxConfig
from levit.dytox.run import TaskOptions

EXAMPLES = """
examples:
  levit train dytox-cifar10 --embed-dim 96 --num-heads 4 --depth 3 --epochs 10 --limit 5000
  levit train dytox-cifar100 --first-classes 50 --classes-per-task 10      (B50 Inc10)
  levit train dytox-cifar100 --mixup 0.8                                   (DyTox+)
  levit train dytox-cifar10 --method finetune                              (the floor)
  levit train dytox-cifar10 --method dytox-free                            (task-free: nobody says when a task ends)
"""


@dataclass
class DyToxArguments:
    """Train DyTox on the tasks of a preset's stream, one after another, and write a run directory.

    With --method dytox-free no task is told: the stream is seen once, in batches of --stream-batch images.

    The directory holds config.json, metrics.csv, results.json, checkpoint.pt, plots and report.html. Ctrl-C saves a
    checkpoint; --resume goes on from it as if the run had never stopped. --separate makes a pass of the decoder per
    task token, --joint (the default) one for all; that changes speed only.
    """

    config: Annotated[DyToxConfig, tyro.conf.arg(name="")]
    run: Annotated[TaskOptions, tyro.conf.arg(name="")] = field(default_factory=TaskOptions)
    data_dir: str | None = None
    """Folder of the data files; default $LEVIT_DATA, else ~/.cache/levit/data."""
    download: bool = False
    """Let torchvision fetch a data set that is missing."""
    out: Path | None = None
    """Run directory; default runs/PRESET-METHOD-seedSEED, with -2, -3, … where that is taken."""
    resume: bool = False
    """Go on with the run in --out (or the latest default directory), with its own configuration."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""
    threads: int | None = None
    """CPU threads; default torch's."""
    tensorboard: bool = False
    """Also write metrics.csv's columns as event files, into the run's folder tensorboard (needs that package)."""
    quiet: bool = False
    """No progress, only the result."""


def parse_dytox(preset: str, arguments: list[str], stored: dict[str, Any] | None = None) -> DyToxArguments:
    """The arguments of `train`; what is not given is the preset's, or that of a `stored` config.json."""
    values, options = (PRESETS[preset], {}) if stored is None else (stored["config"], stored["options"])
    spelled = {"--separate": "--no-joint"}
    return tyro.cli(
        DyToxArguments,
        prog=f"levit train {preset}",
        description=f"{inspect.cleandoc(DyToxArguments.__doc__ or '')}\n{EXAMPLES}",
        args=[spelled.get(argument, argument) for argument in arguments if argument != "--joint"],
        default=DyToxArguments(DyToxConfig(**values), TaskOptions(**options)),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
