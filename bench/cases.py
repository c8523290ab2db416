"""Every case by its title; building one costs time and memory, so a case is a function until it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from bench import compile_cases, model_cases, op_cases, task_cases
from bench.harness import Case

Builder = Callable[[], Case]

STEPS: dict[str, Builder] = {f"step K={k}": partial(model_cases.step, k) for k in (1, 5, 32)}
INFERENCE: dict[str, Builder] = {
    f"inference K={k} B={b}": partial(model_cases.inference, k, b) for k in (1, 5, 32) for b in (256, 1)
}
OPS: dict[str, Builder] = op_cases.OPS | task_cases.OPS
FOR_BARS: dict[str, Builder] = {
    "step K=8": partial(model_cases.step, 8),
    "conv_vae B=64": partial(model_cases.conv_vae, 64),
    "growth K=2,64": partial(model_cases.growth, 2, 64),
    "inference K=32 B=256 last": partial(model_cases.inference, 32, 256, to_last=True),
    "inference K=32 B=256 last bf16": partial(model_cases.inference, 32, 256, to_last=True, precision="bf16"),
    "inference K=32 B=256 bf16": partial(model_cases.inference, 32, 256, precision="bf16"),
    **{f"step K={k} bf16": partial(model_cases.step, k, "bf16") for k in (5, 8, 32)},
    **task_cases.FOR_BARS,
}

CASES: dict[str, Builder] = STEPS | INFERENCE | OPS | FOR_BARS
SLOW: dict[str, Builder] = {
    "compiled step K=8": partial(compile_cases.step, 8),
    **{f"compiled inference K={k} B=256": partial(compile_cases.inference, k, 256) for k in (8, 32)},
}
"""Minutes each, so they are left out unless a name fits nothing else."""


def select(names: Iterable[str] = ()) -> dict[str, Builder]:
    """Cases with one of `names` for a title, else all that contain it; all of `CASES` without a name.

    `ValueError` if a name fits none.
    """
    names = list(names)
    chosen = dict.fromkeys([] if names else CASES)
    for name in names:
        fitting = [title for title in CASES if name.lower() == title.lower()]
        fitting = fitting or [title for title in CASES if name.lower() in title.lower()]
        fitting = fitting or [title for title in SLOW if name.lower() in title.lower()]
        if not fitting:
            raise ValueError(f"--only: expected a part of one of {', '.join(CASES | SLOW)}; got {name!r}")
        chosen |= dict.fromkeys(fitting)
    return {title: build for title, build in (CASES | SLOW).items() if title in chosen}
