"""The command `levit`: train, eval, predict, report, estimate, info."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from levit.arguments import (
    DetectionArguments,
    EvalArguments,
    PredictArguments,
    ReportArguments,
    parse,
    parse_estimate,
)
from levit.config import PRESETS
from levit.families import ALL_PRESETS, family_of
from levit.report.progress import RichDisplay
from levit.report.tables import matrix_table, result_table
from levit.report.tensorboard import TensorBoardLog, check_tensorboard
from levit.runs import RunDirectory, RunError, latest_run_path, new_run_path
from levit.streams import configured_dataset
from levit.train import Interrupted, train

OVERVIEW = f"""usage: levit COMMAND ...

Task-free continual learning of images with LEViT: a stream is seen once, experts are added as it changes.

commands:
  train PRESET       train on a stream, into a run directory
  eval RUN           accuracy of a trained run on the test images
  predict RUN IMAGE  labels for image files
  report RUN...      result table of one or more runs, mean and deviation over seeds
  report detection   what each expansion rule finds on streams whose changes are known
  estimate PRESET    parameters, bytes and seconds of a model with many experts, on this machine
  info               versions, devices, kernels

presets: {", ".join(ALL_PRESETS)}

examples:
  levit train digits                                    under 2 minutes, needs no data
  levit train split-mnist --seed 0 --max-experts 10     any field of the configuration is a flag
  levit train split-mnist --method finetune --limit 3000
  levit report runs/*
  levit COMMAND --help                                  all options of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 for a run that failed, 2 for a bad command, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0
    try:
        if name not in COMMANDS:
            raise ValueError(f"{name!r} is no command.{_nearest(name, COMMANDS)} See levit --help")
        return COMMANDS[name](rest)
    except BrokenPipeError:  # the reader (head, less) has seen enough; the interpreter must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RunError, ValueError) as error:
        if os.environ.get("LEVIT_DEBUG"):
            raise
        print(f"levit: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"levit: {stop or 'interrupted'}", file=sys.stderr)
        return 130


def _train(arguments: list[str]) -> int:
    preset, rest = _preset("train", arguments, ALL_PRESETS)
    family = family_of(preset)
    args = family.parse(preset, rest)
    stem = Path("runs") / f"{preset}-{args.run.method}-seed{args.config.seed}"
    if args.resume:
        args.out = args.out or latest_run_path(stem)
        stored = RunDirectory(args.out).read_config()
        if stored["preset"] != preset:
            raise RunError(f"{args.out}: a run of preset {stored['preset']}, not {preset}; choose another --out")
        path, args = args.out, family.parse(preset, rest, stored)
        args.out = path
    _set_up(args.device, args.threads)

    if args.tensorboard:
        check_tensorboard()
    console = Console(stderr=True)
    stream = family.run_stream(args.config, args.run, args.data_dir, args.download)
    run = RunDirectory(args.out or new_run_path(stem))
    display = RichDisplay(console, len(stream), len(stream.ends), args.quiet)
    what = f"{len(stream)} images of {stream.data.name}, {args.config.scenario}, {len(stream.ends)} experience(s)"
    display.say(f"{preset}: {what}, into {run.path}")
    command = shlex.join(["levit", "train", preset, *rest])
    with display:
        results = train(
            run,
            args.config,
            args.run,
            stream,
            display,
            preset=preset,
            device=args.device,
            command=command,
            resume=args.resume,
            logs=[TensorBoardLog] if args.tensorboard else [],
            build=family.training,
        )
    _stdout().print(result_table([(run.read_config(), results)]))
    _write_report(run, display.say)
    display.say(f"written: {run.path}")
    return 0


def _eval(arguments: list[str]) -> int:
    from levit.inference import evaluate, load_model, run_config

    args = parse(EvalArguments, "eval", arguments)
    _set_up(args.device, args.threads)
    run = RunDirectory(args.directory)
    cfg, config = run_config(run), run.read_config()
    if hook := config["stream"]["normalize"]:
        raise RunError(f"{run.path}: trained with the hook {hook}; use levit.inference.evaluate with the same stream")
    data = configured_dataset(cfg, args.data_dir)
    if data.sha256 != config["data"]["sha256"]:
        raise RunError(f"{run.path}: trained on other data than {data.source} (sha256 {data.sha256} differs)")
    stream = family_of(config["preset"]).test_stream(cfg, data, test_limit=args.test_limit)
    model, seen = load_model(run, args.device, args.routing, args.prior), run.load_checkpoint()["progress"]["seen"]
    result = evaluate(model, stream, args.device, args.by_task, seen if model.num_experts > 1 else None)
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"accuracy per sample, all classes: {100 * result['accuracy']:.2f} %")
    print("by experience: " + "  ".join(f"{100 * value:.2f}" for value in result["accuracy_by_experience"]))
    print("images by expert: " + "  ".join(map(str, result["images_by_expert"])))
    if "route_accuracy" in result:
        print(f"route accuracy: {100 * result['route_accuracy']:.2f} %")
    if args.by_task:
        print(f"by-task (leaks): {100 * result['by-task (leaks)']:.2f} %")
    return 0


def _predict(arguments: list[str]) -> int:
    from levit.inference import load_model, predict, read_images, run_config

    args = parse(PredictArguments, "predict", arguments)
    _set_up(args.device, None)
    run = RunDirectory(args.directory)
    cfg = run_config(run)
    model = load_model(run, args.device)
    answers = []
    for path in args.images:
        found = predict(model, read_images(path, cfg).to(args.device))
        names = [str(path)] if len(found) == 1 else [f"{path}[{i}]" for i in range(len(found))]
        answers += [{"image": name, **answer} for name, answer in zip(names, found, strict=True)]
    if args.json:
        print(json.dumps(answers))
    else:
        print("image\tlabel\texpert\tconfidence\tknown")
        for answer in answers:
            known = "yes" if answer["known"] else "no"
            print(f"{answer['image']}\t{answer['label']}\t{answer['expert']}\t{answer['confidence']:.4f}\t{known}")
    return 0


def _report(arguments: list[str]) -> int:
    if arguments[:1] == ["detection"]:
        return _report_detection(arguments[1:])
    args = parse(ReportArguments, "report", arguments)
    runs = [RunDirectory(path) for path in args.directories]
    if not runs:
        raise ValueError("name at least one run directory: levit report RUN...")
    out = _stdout()
    contents = [(run.read_config(), run.read_results()) for run in runs]
    out.print(result_table(contents))
    if len(runs) == 1:
        out.print(matrix_table(contents[0][1]))
    if args.write:
        for run in runs:
            _write_report(run, out.print)
    if args.compare is not None:
        _write_comparison(runs, args.compare, out.print)
    return 0


def _report_detection(arguments: list[str]) -> int:
    from levit.detection import detection_runs
    from levit.report.detection import detection_table, write_detection

    args = parse(DetectionArguments, "report detection", arguments)
    _set_up("cpu", args.threads)
    given = {"memory_size": args.memory_size, "updates_per_batch": args.updates_per_batch}
    overrides = {name: value for name, value in given.items() if value is not None}
    if args.energy_threshold is not None:
        overrides["energy_threshold"] = args.energy_threshold
    console = Console(stderr=True)

    def display(title: str, images: int, experiences: int) -> RichDisplay:
        shown = RichDisplay(console, images, experiences, args.quiet)
        shown.say(title)
        return shown

    runs = detection_runs(args.out, args.streams, args.rules, args.seeds, args.limit, overrides, args.data_dir, display)
    _stdout().print(detection_table(runs))
    write_detection(runs, args.out, lambda text: console.print(text, highlight=False, soft_wrap=True))
    return 0


def _estimate(arguments: list[str]) -> int:
    from levit.estimate import estimate

    preset, rest = _preset("estimate", arguments, PRESETS)
    args = parse_estimate(preset, rest)
    _set_up(args.device, args.threads)
    found = estimate(args.config, args.experts, args.device, args.seconds)
    if args.json:
        print(json.dumps(found))
        return 0
    mib = {name: f"{found[name] / 2**20:,.1f} MiB" for name in ("model_bytes", "memory_bytes", "cache_bytes")}
    stored = "" if found["cache_stores_features"] or args.experts == 1 else " (features are computed at every step)"
    print(f"{preset}, {found['experts']} experts, {found['device']}, {found['threads']} thread(s)")
    print(f"parameters            {found['parameters']:,} ({mib['model_bytes']} with buffers)")
    print(f"memory                {mib['memory_bytes']} for {args.config.memory_size} images")
    print(f"cache                 {mib['cache_bytes']}{stored}")
    print(f"learning              {found['seconds_per_thousand_images']:.2f} s per thousand images")
    print(f"prediction            {found['prediction_seconds_per_thousand_images']:.2f} s per thousand images")
    return 0


def _info(arguments: list[str]) -> int:
    from levit_kernels.info import main as kernels_info

    if arguments and arguments[0] not in ("-h", "--help"):
        raise ValueError(f"info takes no arguments, got {' '.join(arguments)}")
    kernels_info()
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "predict": _predict,
    "report": _report,
    "estimate": _estimate,
    "info": _info,
}


def _preset(command: str, arguments: list[str], presets: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """The preset that a command names first, and the rest; help without one is that for digits."""
    preset, rest = (arguments[0], arguments[1:]) if arguments else ("-", [])
    if preset in ("-h", "--help"):
        print(f"levit {command} PRESET [OPTIONS]; PRESET is one of {', '.join(presets)}. The defaults are digits'.\n")
        return "digits", ["--help"]
    if preset.startswith("-"):
        raise ValueError(f"name a preset first: levit {command} PRESET [OPTIONS]; presets are {', '.join(presets)}")
    if preset not in presets:
        known = ", ".join(presets)
        raise ValueError(f"preset: expected one of {known}; got {preset!r}.{_nearest(preset, presets)}")
    return preset, rest


def _set_up(device: str, threads: int | None) -> None:
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads: expected at least 1, got {threads}")
        torch.set_num_threads(threads)
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} was asked for, but this torch ({torch.__version__}) sees no such device")


def _write_report(run: RunDirectory, say: Callable[[str], Any]) -> None:
    """Plots and report.html; without matplotlib the page has no plots, and that is said."""
    from levit.report.page import write_page

    plots: list[Path] = []
    try:
        from levit.report.plots import write_plots
    except ImportError:
        say("no plots: matplotlib is not installed (pip install matplotlib, then levit report RUN --write)")
    else:
        plots = write_plots(run)
    write_page(run, plots)


def _write_comparison(runs: Sequence[RunDirectory], path: Path, say: Callable[[str], Any]) -> None:
    """The page of several runs; without matplotlib it has no plots, and that is said."""
    from levit.report.page import write_comparison

    plot = None
    try:
        from levit.report.plots import comparison_plot, png
    except ImportError:
        say("no plots: matplotlib is not installed (pip install matplotlib)")
    else:
        plot = png(comparison_plot(runs))
    write_comparison(runs, path, plot)
    say(f"written: {path}")


def _stdout() -> Console:
    """Standard output; a file gets wide lines, where a terminal would wrap."""
    return Console() if sys.stdout.isatty() else Console(width=180)


def _nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
