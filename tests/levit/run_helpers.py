"""Small runs for the tests of run directories, and how to compare what they left."""

import csv
import os
import signal

import torch

from levit.config import LEViTConfig
from levit.runs import RunDirectory
from levit.train import RunOptions, build_stream, train

SMALL = dict(
    embed_dim=8, num_heads=2, head_hidden=(8,), vae_hidden=(8, 8), latent_dim=4, memory_size=60, train_batch=16
)
TIMINGS = {"seconds", "samples_per_second", "evaluation_seconds", "seconds_per_thousand_images", "peak_memory_mib"}


class Watcher:
    """A display that records, and that calls `action` when the stream has come to image `at`."""

    def __init__(self, at=None, action=None):
        self.at, self.action = at, action
        self.positions, self.evaluations, self.texts = [], [], []

    def batch(self, progress, event, experts):
        self.positions.append(progress.position)
        if progress.position == self.at:
            self.action()

    def evaluated(self, progress, experience, experts):
        self.evaluations.append((progress.position, experience))

    def say(self, text):
        self.texts.append(text)


def config(**overrides):
    return LEViTConfig.preset("digits", **(SMALL | overrides))


def go(path, watcher=None, resume=False, cfg=None, **options):
    cfg = cfg or config()
    options = RunOptions(**({"limit": 300, "log_every": 20, "checkpoint_every": 100} | options))
    stream = build_stream(cfg, options)
    watcher = watcher or Watcher()
    return train(RunDirectory(path), cfg, options, stream, watcher, preset="digits", command="test", resume=resume)


def interrupt(number=signal.SIGINT):
    return lambda: os.kill(os.getpid(), number)


def metrics(path, without=("seconds", "samples_per_second")):
    with open(path / "metrics.csv", newline="") as file:
        rows = list(csv.reader(file))
    keep = [i for i, name in enumerate(rows[0]) if name not in without]
    return [[row[i] for i in keep] for row in rows]


def checkpoint(path):
    return torch.load(path / "checkpoint.pt", weights_only=True)


def equal(a, b):
    """Bit-equal, all the way down, but for timings."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a if key not in TIMINGS | {"row_seconds"})
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b
