"""Arguments for every op: curated sizes with ids, memory layouts, and backends to run them on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import levit_kernels
from levit_kernels import _vae, native
from levit_kernels.composed import dkf_fuse as composed_dkf_fuse
from levit_kernels.composed import expert_attention as composed_attention
from levit_kernels.composed import expert_attention_backward as composed_backward
from levit_kernels.composed import latent_distance as composed_distance
from levit_kernels.composed import task_attention as composed_tasks
from levit_kernels.composed import vae as composed_vae
from levit_kernels.dkf_fuse import dkf_fuse_reference
from levit_kernels.elbo_loss import elbo_loss_reference
from levit_kernels.expansion_distances import expansion_distances_reference
from levit_kernels.expert_attention import expert_attention_reference
from levit_kernels.latent_distance import latent_distance_reference
from levit_kernels.task_attention import task_attention_reference

GATES = ("none", "K", "KH", "BK1", "BKH")
LAYOUTS = ("dense", "transposed", "sliced", "expanded")
BACKENDS = ("reference", "torch", "torch-small-tiles", "cpu")
NATIVE_OPS = (  # that backend "cpu" has a kernel for
    "expert_attention",
    "latent_distance",
    "elbo_loss",
    "dkf_fuse",
    "task_attention",
)


@dataclass(frozen=True)
class Op:
    function: Callable
    reference: Callable
    make: Callable[..., tuple]  # (generator, **sizes) -> float64 arguments
    sizes: dict[str, dict]  # id -> sizes


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def make_gates(generator: torch.Generator, kind: str, batch: int, experts: int, heads: int, zeros: bool):
    if kind == "none":
        return None
    shape = {"K": (experts,), "KH": (experts, heads), "BK1": (batch, experts, 1), "BKH": (batch, experts, heads)}[kind]
    gates = _normal(generator, *shape)
    if zeros:  # routed inference: experts younger than the image's own, and some more in between
        gates = gates * (torch.rand(shape, generator=generator, dtype=torch.float64) < 0.6)
        if kind.startswith("B"):
            youngest = torch.randint(0, experts, (batch, 1, 1), generator=generator)
            gates = gates * (torch.arange(experts)[None, :, None] <= youngest)
    return gates


def make_expert_attention(generator, B, K, N, P, Q, H, d, gates="none", zeros=False):
    return (
        _normal(generator, B, N, P),
        _normal(generator, K, P, Q, scale=P**-0.5),
        _normal(generator, K, Q, scale=0.3),
        _normal(generator, K, Q, 3, H, d, scale=1.5 * Q**-0.5),
        _normal(generator, K, 3, H, d, scale=0.3),
        make_gates(generator, gates, B, K, H, zeros),
        0.2,
    )


def make_dkf_fuse(generator, M, K, N, H, d, B=None, gates="K", zeros=False):
    index = None if B is None else torch.randint(0, M, (B,), generator=generator)
    return (
        _normal(generator, M, K, N, H * d),
        make_gates(generator, gates, M if B is None else B, K, H, zeros),
        index,
    )


def make_latent_distance(generator, K, M, L):
    return _normal(generator, K, M, L), _normal(generator, M, L)


def _make_vae(generator, patterns: dict[str, str], **sizes):
    weights = []
    for pattern in patterns.values():
        shape = [sizes[letter] for letter in pattern.split()]
        weights.append(_normal(generator, *shape, scale=shape[1] ** -0.5 if len(shape) == 3 else 0.3))
    return weights


def make_expansion_distances(generator, K, M, F, h1, h2, L, noise=True):
    return (
        _normal(generator, M, F),
        _make_vae(generator, _vae.ENCODER, K=K, F=F, h1=h1, h2=h2, L=L),
        _normal(generator, M, L),
        _normal(generator, K, M, L) if noise else None,
    )


def make_elbo_loss(generator, B, K, F, h1, h2, L, g1, g2, S=None):
    sizes = {"K": K, "F": F, "h1": h1, "h2": h2, "L": L, "g1": g1, "g2": g2}
    return (
        _normal(generator, B, F),
        _make_vae(generator, _vae.ENCODER, **sizes),
        _make_vae(generator, _vae.DECODER, **sizes),
        0.5,
        None if S is None else _normal(generator, S, L),
    )


def make_task_attention(generator, B, T, N, heads, d, scale=None):
    width = heads * d
    return (
        _normal(generator, T, width),
        _normal(generator, B, N, width),
        *(_normal(generator, width, width, scale=1.5 * width**-0.5) for _ in range(4)),
        _normal(generator, width, scale=0.3),
        heads,
        scale,
    )


OPS = {
    "expert_attention": Op(
        levit_kernels.expert_attention,
        expert_attention_reference,
        make_expert_attention,
        {
            "mnist": dict(B=3, K=3, N=16, P=49, Q=100, H=3, d=100),
            "mnist-one-expert": dict(B=5, K=1, N=16, P=49, Q=100, H=3, d=100),
            "cifar": dict(B=2, K=2, N=16, P=192, Q=100, H=3, d=100),
            "digits": dict(B=9, K=4, N=16, P=4, Q=32, H=2, d=32),
            "odd": dict(B=7, K=5, N=5, P=3, Q=13, H=3, d=11),
            "one-token": dict(B=4, K=3, N=1, P=29, Q=17, H=1, d=17),
            "ones": dict(B=1, K=1, N=1, P=1, Q=1, H=1, d=1),
        },
    ),
    "dkf_fuse": Op(
        levit_kernels.dkf_fuse,
        dkf_fuse_reference,
        make_dkf_fuse,
        {
            "mnist-store": dict(M=21, K=7, N=16, H=3, d=100, B=8),
            "mnist-few-experts": dict(M=21, K=2, N=16, H=3, d=100, B=8),
            "all-rows": dict(M=6, K=5, N=16, H=2, d=32),
            "odd": dict(M=5, K=9, N=3, H=5, d=7, B=11),
            "one-row": dict(M=1, K=4, N=2, H=3, d=5, B=3),
            "ones": dict(M=1, K=1, N=1, H=1, d=1),
        },
    ),
    "latent_distance": Op(
        levit_kernels.latent_distance,
        latent_distance_reference,
        make_latent_distance,
        {
            "mnist": dict(K=7, M=100, L=50),
            "cifar": dict(K=3, M=40, L=200),
            "odd": dict(K=5, M=37, L=13),
            "one-expert": dict(K=1, M=9, L=16),
            "ones": dict(K=1, M=1, L=1),
        },
    ),
    "expansion_distances": Op(
        levit_kernels.expansion_distances,
        expansion_distances_reference,
        make_expansion_distances,
        {
            "mnist": dict(K=4, M=20, F=784, h1=200, h2=200, L=50),
            "digits": dict(K=3, M=33, F=64, h1=64, h2=64, L=16),
            "mean-codes": dict(K=5, M=11, F=31, h1=17, h2=9, L=5, noise=False),
            "odd": dict(K=5, M=13, F=31, h1=17, h2=9, L=5),
            "one-expert": dict(K=1, M=7, F=19, h1=5, h2=8, L=3),
            "ones": dict(K=1, M=1, F=1, h1=1, h2=1, L=1),
        },
    ),
    "elbo_loss": Op(
        levit_kernels.elbo_loss,
        elbo_loss_reference,
        make_elbo_loss,
        {
            "mnist": dict(B=6, K=4, F=784, h1=200, h2=200, L=50, g1=200, g2=200),
            "mnist-samples": dict(B=3, K=2, F=784, h1=200, h2=200, L=50, g1=200, g2=200, S=10),
            "digits": dict(B=9, K=3, F=64, h1=64, h2=64, L=16, g1=64, g2=64),
            "odd": dict(B=7, K=5, F=31, h1=17, h2=9, L=5, g1=8, g2=13, S=3),
            "one-expert": dict(B=5, K=1, F=19, h1=5, h2=8, L=3, g1=4, g2=6),
            "ones": dict(B=1, K=1, F=1, h1=1, h2=1, L=1, g1=1, g2=1, S=1),
        },
    ),
    "task_attention": Op(
        levit_kernels.task_attention,
        task_attention_reference,
        make_task_attention,
        {  # few tokens are folded into W_k, many meet projected patches: see task_forms.folds
            "cifar": dict(B=2, T=3, N=64, heads=12, d=8),
            "many-tokens": dict(B=3, T=23, N=16, heads=4, d=12),
            "odd": dict(B=7, T=3, N=5, heads=3, d=5, scale=0.7),
            "odd-many": dict(B=7, T=11, N=5, heads=3, d=5),
            "fifty-tokens": dict(B=2, T=50, N=17, heads=2, d=20),
            "one-token": dict(B=2, T=1, N=7, heads=2, d=7),
            "one-patch": dict(B=4, T=5, N=1, heads=2, d=7),
            "ones": dict(B=1, T=1, N=1, heads=1, d=1),
        },
    ),
}


def runs(name: str, op: str) -> bool:
    """Whether the backend has a kernel for the op."""
    return name != "cpu" or op in NATIVE_OPS


def curated(op: str) -> Iterator[tuple[str, dict]]:
    """(id, sizes) of every curated case; gates of every kind, with and without zeros, on the small sizes."""
    for name, sizes in OPS[op].sizes.items():
        if op not in ("expert_attention", "dkf_fuse"):
            yield name, sizes
            continue
        every = name in ("odd", "digits", "all-rows", "ones", "mnist-few-experts")
        for kind in GATES[op == "dkf_fuse" :]:
            if every or kind in ("none", "K"):
                yield f"{name}-{kind}", {**sizes, "gates": kind}
            if kind != "none" and (every or kind in ("BK1", "KH")):
                yield f"{name}-{kind}-zeros", {**sizes, "gates": kind, "zeros": True}


def is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def to_dtype(args: tuple, dtype: torch.dtype) -> tuple:
    return tree_map(lambda x: x.to(dtype) if is_float(x) else x, args)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (for "expanded": the first row's, repeated) in other memory; what lies between them is NaN."""
    if layout == "transposed":
        return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))
    if layout == "sliced":
        room = torch.full([2 * n + 1 for n in x.shape], torch.nan, dtype=x.dtype)
        view = room[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return view.copy_(x)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x.contiguous()


def run_with_vectors(capability: str, code: str) -> None:
    """Runs code beside these tests in a Python of its own, with vectors that this machine would not choose by itself:
    torch's own limit, ATEN_CPU_CAPABILITY, is read before the first call.
    """
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1])])
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with backend("cpu"):  # skips where it is not built
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a backend; "torch-small-tiles" cuts even small problems into many pieces."""
    if name == "cpu" and not native.available()[0] and os.environ.get("LEVIT_REQUIRE_NATIVE") != "1":
        pytest.skip(native.available()[1])
    if name != "torch-small-tiles":
        with levit_kernels.use_backend(name):
            yield
        return
    tables = (
        composed_attention.TILE_BYTES,
        composed_backward.CHUNK_BYTES,
        composed_dkf_fuse.GATHER_BYTES,
        composed_distance.SLICE_BYTES,
        composed_vae.TILE_BYTES,
        composed_tasks.TILE_BYTES,
    )
    before = [table["cpu"] for table in tables], composed_dkf_fuse.BAG_INDICES
    try:
        for table in tables:
            table["cpu"] = 3000
        composed_dkf_fuse.BAG_INDICES = 40
        with levit_kernels.use_backend("torch"):
            yield
    finally:
        for table, value in zip(tables, before[0], strict=True):
            table["cpu"] = value
        composed_dkf_fuse.BAG_INDICES = before[1]


def evaluate(function: Callable, args: tuple, grad: torch.Tensor | None = None) -> tuple[torch.Tensor, list]:
    """-> result and, if `grad` is given, the gradient of every floating tensor in order (zeros where there is none)."""
    args = tree_map(lambda x: x.detach().requires_grad_() if is_float(x) and grad is not None else x, args)
    out = function(*args)
    if grad is None:
        return out, []
    leaves = [x for x in tree_leaves(args) if is_float(x)]
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), materialize_grads=True)
    return out.detach(), list(grads)
