"""What each command of `levit` can be given: one dataclass per command, read by tyro."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from levit.config import PRESETS, VARIANTS, LEViTConfig
from levit.train import RunOptions

TRAIN_EXAMPLES = """
examples:
  levit train digits
  levit train split-mnist --seed 1 --variant levit-no-dkf --out runs/no-dkf
  levit train split-mnist --out runs/no-dkf --resume
  levit train split-fashion --method reference --limit 3000 --memory-size 300
"""

Arguments = TypeVar("Arguments")
FLAGS = (tyro.conf.FlagCreatePairsOff,)
"""A switch is --resume alone, not --resume | --no-resume."""


@dataclass
class TrainArguments:
    """Train a method on a preset's stream, once and in order, and write a run directory.

    The directory holds config.json, metrics.csv, results.json, checkpoint.pt, plots and report.html. Ctrl-C saves a
    checkpoint; --resume goes on from it as if the run had never stopped.
    """

    config: Annotated[LEViTConfig, tyro.conf.arg(name="")]
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    variant: Literal["levit-dkf", "levit-no-dkf", "levit-dkf-fixed", "levit-dnn"] | None = None
    """Gates that are learned, none, or constant, or MLPs as experts: sets gating or expert; their flags come on top."""
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


@dataclass
class EvalArguments:
    """Evaluate a run's latest checkpoint on the test images of its data set."""

    directory: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    data_dir: str | None = None
    """Folder of the data files; default $LEVIT_DATA, else ~/.cache/levit/data."""
    test_limit: int | None = None
    """Test images, of each experience in proportion; None means all."""
    routing: Literal["vae", "shared", "fused"] | None = None
    """Route by another rule than the run's. Routing never changes what is learned."""
    prior: Literal["none", "shared"] | None = None
    """Take labels from another rule than the run's; `shared` needs a run that was trained with it."""
    by_task: bool = False
    """Also the protocol that tells the model which images belong together; shown as `by-task (leaks)`."""
    json: bool = False
    """Print JSON, accuracies from 0 to 1."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""
    threads: int | None = None
    """CPU threads; default torch's."""


@dataclass
class PredictArguments:
    """Print a line per image: file, label, expert chosen, confidence, and whether any expert knows such images.

    A run trained with --no-calibration gives the plain softmax value, and calls every image known.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Pictures of the model's size, or .npz files with an array of images."""
    json: bool = False
    """Print a JSON list instead."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""


@dataclass
class ReportArguments:
    """Print the result table of finished runs; runs that differ in the seed alone share a row, mean ± deviation."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories."""
    write: bool = False
    """Also draw every run's plots and report.html again."""
    compare: Path | None = None
    """Also write this .html file, which shows the runs side by side."""


@dataclass
class DetectionArguments:
    """Train every rule on streams whose changes are known, though never shown to it, and say what it found.

    Writes detection.csv, detection.html and the run directories; finished runs there are not repeated, interrupted ones
    go on.
    """

    streams: tuple[str, ...] = ("split-mnist", "split-mnist-shuffled", "split-fashion", "permuted-mnist")
    """Presets; with -shuffled behind the name the same images in random order, where every alarm is a false one."""
    rules: tuple[Literal["calibrated", "latent", "energy"], ...] = ("calibrated", "latent")
    """Expansion rules."""
    seeds: tuple[int, ...] = (0,)
    """Of the runs."""
    limit: int | None = 12000
    """Images of each stream; None means all."""
    memory_size: int = 500
    """Of the runs: the published rules fire when the memory is full, so it has to suit the limit."""
    updates_per_batch: int | None = None
    """Of the runs; None takes the presets'."""
    energy_threshold: float | None = None
    """Of rule energy, which has no default."""
    out: Path = Path("runs/detection")
    """Folder of the runs and of the report."""
    data_dir: str | None = None
    """Folder of the data files; default $LEVIT_DATA, else ~/.cache/levit/data."""
    threads: int | None = None
    """CPU threads; default torch's."""
    quiet: bool = False
    """No progress, only the table."""


@dataclass
class EstimateArguments:
    """What a model of K experts with a full memory costs on this machine: parameters, bytes, seconds. Needs no data.

    Times are measured on noise for a few seconds; evaluation and the reading of files are not in them.
    """

    config: Annotated[LEViTConfig, tyro.conf.arg(name="")]
    experts: int = 10
    """K, the active one included."""
    seconds: float = 3.0
    """How long to measure; at least two batches are learned."""
    json: bool = False
    """Print JSON."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""
    threads: int | None = None
    """CPU threads; default torch's."""


def parse(kind: type[Arguments], command: str, arguments: list[str]) -> Arguments:
    """The arguments of a command; `--help` and mistakes end the process as tyro does, with exit codes 0 and 2."""
    return tyro.cli(kind, prog=f"levit {command}", args=arguments, config=FLAGS)


def parse_train(preset: str, arguments: list[str], stored: dict[str, Any] | None = None) -> TrainArguments:
    """The arguments of `train`; what is not given is the preset's and the variant's, or that of a `stored` config.json.

    The variant is read first, so that it decides what the other flags default to.
    """
    values, options = (PRESETS[preset], {}) if stored is None else (stored["config"], stored["options"])
    description = f"{inspect.cleandoc(TrainArguments.__doc__ or '')}\n{TRAIN_EXAMPLES}"

    def parsed(variant: str | None) -> TrainArguments:
        default = TrainArguments(_unresolved(values | VARIANTS[variant or "levit-dkf"]), RunOptions(**options))
        return tyro.cli(
            TrainArguments,
            prog=f"levit train {preset}",
            description=description,
            args=arguments,
            default=default,
            config=FLAGS,
        )

    given = parsed(None)
    return given if given.variant is None else parsed(given.variant)


def parse_estimate(preset: str, arguments: list[str]) -> EstimateArguments:
    """The arguments of `estimate`; what is not given is the preset's."""
    default = EstimateArguments(_unresolved(PRESETS[preset]))
    return tyro.cli(EstimateArguments, prog=f"levit estimate {preset}", args=arguments, default=default, config=FLAGS)


def _unresolved(values: dict[str, Any]) -> LEViTConfig:
    """A configuration whose derived fields (head_dim follows embed_dim) are still open, as defaults of the flags."""
    config = object.__new__(LEViTConfig)
    for item in fields(LEViTConfig):
        value = values.get(item.name, item.default)
        object.__setattr__(config, item.name, tuple(value) if isinstance(value, list) else value)
    return config
