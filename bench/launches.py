"""`python -m bench.launches`: how many kernels a step of Algorithm 1 starts on a GPU, reference and fused; needs none.

A step is observed on the CPU, in a mode that sees every operator that torch dispatches. One that makes a view, an
allocation, a copy to the host or the host's random numbers starts no kernel; every other counts as one, the fused Adam
of both models too. An op of levit_kernels counts as what its Triton implementation starts: that is called with the
same shapes on tensors without memory, its launches and the operators between them are counted, and the numbers the step
goes on with come from plain torch.

It also lists what a step makes the host wait for.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import levit
from bench import model_cases
from levit_kernels import use_backend
from levit_kernels._loss import LossWithGradients
from levit_kernels.backends import registry
from levit_kernels.backends import triton as triton_backend

EXPERTS = (2, 8, 32)
MEMORY = 200  # a step's launches do not depend on it: kernels take any number of stored codes and rows
BAR = 10
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view")
_HOST = ("randn", "randint", "rand", "_local_scalar_dense")
_BOOKKEEPING = ("promote_types", "_record_function_enter_new", "_record_function_exit")
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")


class Launches(TorchDispatchMode):
    """Counts by operator what starts a kernel, and what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if func.namespace != "levit_kernels" and not is_view and name not in (*_FREE, *_HOST, *_BOOKKEEPING):
            self.kernels[name] += 1
        if name in _WAITS or (name in ("index", "index_put_") and _by_truth(args[1])):
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


def _by_truth(indices: Sequence[Tensor | None]) -> bool:
    """Whether an index is a mask, whose number of rows only the device knows."""
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


@contextmanager
def counting() -> Iterator[Launches]:
    """Inside, a forced "triton" backend starts nothing and is counted, whether or not this machine could run it."""
    mode, table = Launches(), registry.backends()
    plain = {**table["reference"].ops, **table["torch"].ops}
    plain |= {op: partial(_at_once, plain[op]) for op in ("vae_training_loss", "head_training_loss")}

    def run(op: str, *args: Any) -> Any:
        from levit_kernels.triton.launch import listening

        def listener(started: Any) -> bool:
            mode.kernels[f"{op}: {started.kernel.__name__.lstrip('_')}"] += 1
            return False

        with _disable_current_modes():
            with listening(listener), mode:
                triton_backend.OPS[op](*tree_map_only(Tensor, _without_memory, args))
            return plain[op](*args)

    ops = {op: partial(run, op) for op in triton_backend.OPS}
    kept = table["triton"]
    table["triton"] = registry.Backend("triton", ops, lambda op, args: None)
    try:
        with mode:
            yield mode
    finally:
        table["triton"] = kept


def _at_once(loss: Callable[..., Any], *args: Any) -> Any:
    """A training loss of plain torch with its gradients, which must not show as operators of a backward pass."""

    def compute() -> list[Tensor]:
        with torch.enable_grad():
            found = loss(*args)
            value, *others = found if isinstance(found, tuple) else (found,)
            grads = [x.contiguous() for x in torch.autograd.grad(value, asked)]  # as kernels write them
            return [value.detach(), *grads, *others]

    asked = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad]
    value, *others = LossWithGradients.apply(compute, False, *asked)
    return (value, *others) if others else value


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def of_a_step(
    kind: str,
    cfg: levit.LEViTConfig,
    experts: int,
    counting: Callable[[], AbstractContextManager[Launches]] = counting,
) -> Launches:
    """Of one batch observed with a full memory, by a `reference` or `fused` model: a check that does not fire."""
    model = (levit.reference.LEViT if kind == "reference" else levit.LEViT)(cfg)
    for _ in range(experts - 1):
        model.add_expert()
    # plain torch by default updates parameter by parameter on a CPU, and in groups of them on a GPU
    model.new_optimizer = lambda learning_rate: torch.optim.Adam(model.active.parameters(), learning_rate, fused=True)
    learner = levit.Learner(model)
    generator = torch.Generator().manual_seed(0)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.rand(size, cfg.channels, cfg.image_size, cfg.image_size, generator=generator)
        return images, torch.randint(cfg.num_classes, (size,), generator=generator)

    with use_backend("torch"):
        learner.observe(*batch(cfg.memory_size - cfg.batch_size))
    last = batch(cfg.batch_size)
    with use_backend("triton" if kind == "fused" else "reference"), counting() as mode:
        event = learner.observe(*last)
    assert event.loss is not None and not event.expanded and len(event.distances) == experts - 1
    return mode


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Exit status: 1 if the fused step starts more than a tenth of the reference's kernels with the most experts."""
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__)
    parser.add_argument(
        "--experts", nargs="+", type=int, default=EXPERTS, metavar="K", help="numbers of experts (2 8 32)"
    )
    parser.add_argument("--kernels", action="store_true", help="list how often each operator and kernel occurs")
    options = parser.parse_args(arguments)
    if min(options.experts) < 2:
        parser.error("--experts: expected at least 2, with one there is nothing to check")
    show(f"{model_cases.PRESET}, {model_cases.UPDATES} updates, one check; kernels started and waits of the host")
    share = 0.0
    for experts in options.experts:
        cfg = dataclasses.replace(
            model_cases.config(experts), memory_size=MEMORY, updates_per_batch=model_cases.UPDATES
        )
        counts = {kind: of_a_step(kind, cfg, experts) for kind in ("reference", "fused")}
        reference, fused = (found.kernels.total() for found in counts.values())
        share = reference / fused
        waits = ", ".join(f"{kind} {found.waits.total()}" for kind, found in counts.items())
        show(f"K={experts:<3} reference {reference:6}  fused {fused:5}  {share:5.1f}x fewer; waits: {waits}")
        for kind, found in counts.items() if options.kernels else ():
            show(f"  {kind}: " + ", ".join(f"{name} {count}" for name, count in found.kernels.most_common()))
            show(f"  {kind} waits: " + ", ".join(f"{name} {count}" for name, count in found.waits.most_common()))
    return int(share < BAR)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
