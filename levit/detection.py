"""How well an expansion rule finds the changes of a stream: only the evaluator knows where they are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levit.config import PRESETS, LEViTConfig
from levit.runs import RunDirectory
from levit.train import Display, RunOptions, build_stream, train

SHUFFLED = "-shuffled"
"""Behind a preset's name: all its images in random order, a stream of the same length without a change."""


@dataclass(frozen=True)
class Detection:
    """What a rule did on one stream."""

    delays: tuple[int, ...]
    """Images from each change that was found to the expansion that found it."""
    misses: int
    """Changes without an expansion before the next change or the end."""
    false_alarms: int
    """Expansions that are the first after no change."""


def score(expansions: Sequence[int], changes: Sequence[int]) -> Detection:
    """Compare positions (images seen) of expansions and of changes, both ascending.

    The first expansion behind a change, and before or at the next one, finds it; any other is a false alarm.
    """
    delays, false_alarms = [], sum(at <= min(changes, default=float("inf")) for at in expansions)
    for change, following in zip(changes, [*changes, float("inf")][1:], strict=True):
        found = [at for at in expansions if change < at <= following]
        delays += [found[0] - change] if found else []
        false_alarms += max(0, len(found) - 1)
    return Detection(tuple(delays), len(changes) - len(delays), false_alarms)


def run_score(run: RunDirectory) -> Detection:
    """The detection of a finished run, from its files."""
    return score(run.read_results()["expansions"], run.read_config()["stream"]["ends"][:-1])


def detection_runs(
    out: Path,
    streams: Iterable[str],
    rules: Iterable[str],
    seeds: Iterable[int],
    limit: int | None,
    overrides: dict[str, Any],
    data_dir: str | None,
    display: Callable[[str, int, int], Any],
) -> dict[tuple[str, str], list[RunDirectory]]:
    """Train every rule on every stream with every seed, below `out`; what is finished there stays, the rest goes on.

    Args:
        out: folder of the run directories, `STREAM-RULE-seedSEED`.
        streams: presets, with `SHUFFLED` behind the name for the stream without a change.
        rules: values of `LEViTConfig.criterion`.
        seeds: of the runs.
        limit: images of each stream; None means all.
        overrides: other fields of the configuration; those that a preset fixes already (routing) too.
        data_dir: where the data files are; None means the usual place.
        display: makes the progress display of a run, a context manager: (title, images, experiences).

    Returns:
        The finished runs by (stream, rule).
    """
    finished: dict[tuple[str, str], list[RunDirectory]] = {}
    for stream_name in streams:
        preset = stream_name.removesuffix(SHUFFLED)
        if preset not in PRESETS:
            raise ValueError(f"streams: expected presets (maybe with {SHUFFLED} behind), got {stream_name!r}")
        scenario = {"scenario": "shuffled"} if stream_name.endswith(SHUFFLED) else {}
        for rule in rules:
            for seed in seeds:
                cfg = LEViTConfig.preset(preset, **(overrides | scenario | dict(criterion=rule, seed=seed)))
                run = RunDirectory(out / f"{stream_name}-{rule}-seed{seed}")
                _train(run, cfg, limit, data_dir, preset, display)
                finished.setdefault((stream_name, rule), []).append(run)
    return finished


def _train(
    run: RunDirectory,
    cfg: LEViTConfig,
    limit: int | None,
    data_dir: str | None,
    preset: str,
    display: Callable[[str, int, int], Any],
) -> None:
    # Rows close together show the statistic batch by batch; only the end is evaluated.
    options = RunOptions(limit=limit, eval_every=1000, log_every=cfg.batch_size)
    stream = build_stream(cfg, options, data_dir)
    shown: Display
    with display(run.path.name, len(stream), len(stream.ends)) as shown:
        train(run, cfg, options, stream, shown, preset=preset, command="levit report detection", resume=run.exists)


HEADINGS = ("stream", "rule", "seeds", "delay (images)", "missed", "false alarms", "experts", "accuracy %")


def detection_rows(runs: dict[tuple[str, str], list[RunDirectory]]) -> list[tuple[str, ...]]:
    """Cells under `HEADINGS`, a row per (stream, rule): median and largest delay, sums over seeds, mean accuracy."""
    rows = []
    for (stream, rule), members in runs.items():
        scores = [run_score(run) for run in members]
        results = [run.read_results() for run in members]
        delays = sorted(delay for found in scores for delay in found.delays)
        changes = len(delays) + sum(found.misses for found in scores)
        experts = [result["num_experts"] for result in results]
        rows.append(
            (
                stream,
                rule,
                str(len(members)),
                f"{statistics.median(delays):.0f} (at most {delays[-1]})" if delays else "-",
                f"{changes - len(delays)} of {changes}",
                str(sum(found.false_alarms for found in scores)),
                str(min(experts)) if min(experts) == max(experts) else f"{min(experts)}-{max(experts)}",
                f"{100 * statistics.mean(result['final_accuracy'] for result in results):.2f}",
            )
        )
    return rows
