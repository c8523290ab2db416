"""What a run writes down of how it came about, and of what it cost."""

from __future__ import annotations

import dataclasses
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from levit.config import LEViTConfig
from levit.runs import RunDirectory, RunError, environment
from levit.streams import Stream

if TYPE_CHECKING:
    from levit.train import RunOptions


def description(cfg: LEViTConfig, options: RunOptions, stream: Stream, preset: str, command: str) -> dict[str, Any]:
    """What config.json holds."""
    return {
        "preset": preset,
        "command": command,
        "config": cfg.to_dict(),
        "options": dataclasses.asdict(options),
        "data": {"name": stream.data.name, "source": stream.data.source, "sha256": stream.data.sha256},
        "stream": {
            "scenario": cfg.scenario,
            "images": len(stream),
            "class_order": stream.plan.class_order,
            "experiences": [list(classes) for classes in stream.experiences],
            "classes": [
                {"label": int(label), "data_set": name, "original_label": original}
                for label, (name, original) in zip(stream.label_of_class, stream.data.origins, strict=True)
            ],
            "ends": stream.ends,
            "sha256": stream.checksum(),
            "augment": _hook_name(stream.augment),
            "normalize": _hook_name(stream.normalize),
        },
        **environment(),
    }


def _hook_name(hook: object) -> str | None:
    return None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)


def check_same(run: RunDirectory, config: dict[str, Any]) -> None:
    """`RunError` naming the first difference to the run in the directory."""
    before = run.read_config()
    for part in ("config", "options", "data", "stream"):
        for key, now in config[part].items():
            was = before.get(part, {}).get(key)
            # Where a file lies may change; what is in it may not.
            if was != now and (part, key) != ("data", "source"):
                raise RunError(f"{run.path}: {part}.{key} was {was!r} in this run, now {now!r}; choose another --out")


def peak_memory() -> float:
    """The process's largest resident size so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def peak_device_memory(device: str) -> float | None:
    """The most that torch has held on a GPU so far, MiB; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if torch.device(device).type == "cuda" else None
