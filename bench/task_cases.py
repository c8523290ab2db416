"""DyTox's task attention at its CIFAR sizes: all tokens in one pass, against one pass per token as published."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import levit_kernels
from bench import work
from bench.harness import Case
from levit import DyTox, DyToxConfig
from levit_kernels.composed.linear import matmul
from levit_kernels.task_attention import task_attention_reference

WIDTH, HEADS, PATCHES, BATCH = 384, 12, 64, 32


def task_attention(tokens: int, backward: bool = False) -> Case:
    """The op against T separate passes by plain autograd; `backward`: with the gradients of all its arguments."""
    args = _arguments(tokens)
    needed = attention_work(tokens)
    if backward:
        needed = (1 + work.BACKWARD) * needed
        for x in args:
            x.requires_grad_()

    def call(function: Callable[..., Tensor]) -> Any:
        output = function(*args, HEADS)
        return (output, torch.autograd.grad(output, args, torch.ones_like(output))) if backward else output

    return Case(
        name="task_attention",
        size=f"T={tokens} B={BATCH}" + (" fwd+bwd" if backward else ""),
        variants={
            "separate": partial(call, task_attention_reference),
            "op": partial(call, levit_kernels.task_attention),
        },
        baseline="separate",
        flops=needed.flops,
        bytes=needed.bytes,
        check=partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3),
    )


def over_projection(tokens: int) -> Case:
    """The whole op beside one projection of the patches to keys and values, the least that separate passes share."""
    args = _arguments(tokens)
    want = {"projection": lambda: args[1] @ torch.cat(args[3:5]).t(), "op": lambda: _reference(args)}
    return Case(
        name="task_attention",
        size=f"T={tokens} over a projection",
        variants={"projection": partial(_project, args), "op": partial(levit_kernels.task_attention, *args, HEADS)},
        baseline="projection",
        check=partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3),
        expected=lambda name: want[name](),
    )


def prepare(kind: str, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """For `bench.memory`: (warm-up on one image, one call) of the `op` or of the `projection`."""
    args = _arguments(tokens)
    few = [*args[:1], args[1][:1], *args[2:]]
    if kind == "projection":
        return partial(_project, few), partial(_project, args)
    return partial(levit_kernels.task_attention, *few, HEADS), partial(levit_kernels.task_attention, *args, HEADS)


def dytox(tokens: int) -> Case:
    """The whole forward pass of the CIFAR preset: the decoder once for all tokens, against once per token."""
    joint, separate = model(tokens), model(tokens)
    separate.cfg = dataclasses.replace(separate.cfg, joint=False)
    return Case(
        name="dytox",
        size=f"T={tokens} B={BATCH}",
        variants={"separate": partial(_forward, separate), "joint": partial(_forward, joint)},
        baseline="separate",
        check=partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4),
    )


def growth(few: int, many: int) -> Case:
    """What a forward pass costs with many tasks more than with few; both checked against separate passes."""
    models = {f"T={tokens}": model(tokens) for tokens in (few, many)}

    def expected(name: str) -> Tensor:
        separate = model(int(name.removeprefix("T=")))
        separate.cfg = dataclasses.replace(separate.cfg, joint=False)
        return _forward(separate)

    return Case(
        name="dytox growth",
        size=f"T={few},{many}",
        variants={name: partial(_forward, built) for name, built in models.items()},
        baseline=f"T={few}",
        check=partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4),
        expected=expected,
    )


def model(tokens: int) -> DyTox:
    """Of the CIFAR preset, with this many tasks of two classes."""
    built = DyTox(DyToxConfig.preset("dytox-cifar100"))
    for _ in range(tokens):
        built.add_task(2)
    return built


@torch.no_grad()
def _forward(built: DyTox) -> Tensor:
    return built(torch.rand(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(6)))


def attention_work(tokens: int, batch: int = BATCH) -> work.Work:
    """The cheaper of both forms (`levit_kernels.composed.task_forms`), and the output projection."""
    folded = tokens * (2 * PATCHES * HEADS * WIDTH + WIDTH * WIDTH)
    projected = 2 * PATCHES * WIDTH * WIDTH + 2 * tokens * PATCHES * WIDTH
    each = min(folded, projected) + tokens * WIDTH * WIDTH
    return work.Work(2 * batch * each, work.FLOAT * (4 * WIDTH * WIDTH + batch * (PATCHES + tokens) * WIDTH))


OPS: dict[str, Callable[[], Case]] = {
    f"task_attention T={tokens} B={BATCH}{' fwd+bwd' if backward else ''}": partial(task_attention, tokens, backward)
    for tokens in (5, 50)
    for backward in (False, True)
}
FOR_BARS: dict[str, Callable[[], Case]] = {
    "task_attention T=50 over a projection": partial(over_projection, 50),
    f"dytox T=50 B={BATCH}": partial(dytox, 50),
    "dytox growth T=1,50": partial(growth, 1, 50),
}


def _arguments(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)

    def new(*shape: int, fan_in: int = 1) -> Tensor:
        return torch.randn(shape, generator=generator).div_(fan_in**0.5)

    weights = [new(WIDTH, WIDTH, fan_in=WIDTH) for _ in range(4)]
    return [new(tokens, WIDTH), new(BATCH, PATCHES, WIDTH), *weights, new(WIDTH)]


def _reference(args: list[Tensor]) -> Tensor:
    return task_attention_reference(*args, HEADS)


def _project(args: list[Tensor]) -> Tensor:
    """By the fastest product that there is: a slow one would make the op look better than it is."""
    patches, wk, wv = args[1], args[3], args[4]
    rows = matmul(patches.flatten(0, 1), torch.cat([wk, wv]).t())
    return rows.view(*patches.shape[:2], -1)
