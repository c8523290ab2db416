"""Which memory the kernels touch: nothing beside their arguments and results, and offsets beyond 2**31 are right."""

import mmap

import numpy as np
import pytest
import torch
from op_cases import OPS, evaluate, is_float, to_dtype
from torch.utils._pytree import tree_map

import levit_kernels

GUARD = 64  # numbers on either side
SIZES = {
    "expert_attention": dict(B=3, K=2, N=3, P=5, Q=7, H=2, d=3, gates="BKH"),
    "dkf_fuse": dict(M=3, K=5, N=2, H=3, d=5, B=4, gates="BKH"),
    "latent_distance": dict(K=3, M=5, L=7),
    "expansion_distances": dict(K=2, M=5, F=7, h1=6, h2=5, L=3),
    "elbo_loss": dict(B=3, K=2, F=7, h1=6, h2=5, L=3, g1=4, g2=5, S=2),
    "task_attention": dict(B=3, T=2, N=3, heads=2, d=3),
}
GUARDED = [pytest.param(op, {}, id=op) for op in OPS]
GUARDED.append(pytest.param("task_attention", {"T": 5}, id="task_attention-projected"))


def guarded(x):
    """The same tensor between numbers that nobody may read: NaN, or rows that do not exist."""
    room = torch.full((x.numel() + 2 * GUARD,), torch.nan if x.is_floating_point() else -1, dtype=x.dtype)
    return room, room[GUARD:-GUARD].view(x.shape)


def run(op, args, grad):
    with levit_kernels.use_backend("triton"):
        return evaluate(OPS[op].function, args, grad)


def arguments(op, other):
    args = to_dtype(OPS[op].make(torch.Generator().manual_seed(0), **{**SIZES[op], **other}), torch.float32)
    return args, torch.randn_like(OPS[op].reference(*args))


@pytest.mark.parametrize("op, other", GUARDED)
def test_nothing_beside_the_arguments_is_read_and_nothing_beside_the_results_written(op, other, monkeypatch):
    args, grad = arguments(op, other)
    out, grads = run(op, args, grad)
    rooms, new_empty = [], torch.Tensor.new_empty

    def guarded_empty(self, *shape, **options):
        like = new_empty(self, *shape, **options)
        room, view = guarded(like)
        rooms.append((room, like.numel()))
        return view

    def guard(x):
        return guarded(x)[1].copy_(x) if isinstance(x, torch.Tensor) else x

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded_empty)
    guarded_out, guarded_grads = run(op, tree_map(guard, args), guard(grad))
    monkeypatch.undo()
    assert len(rooms) >= 2
    for room, numbers in rooms:
        for zone in (room[:GUARD], room[GUARD + numbers :]):
            assert zone.isnan().all() if room.is_floating_point() else (zone == -1).all()
    for got, want in zip([guarded_out, *guarded_grads], [out, *grads], strict=True):
        assert torch.equal(got, want)


def far(x, dim):
    """The same values with 2**31 + 12 numbers between neighbours of one dimension, in memory that is never touched."""
    strides = list(torch.empty(x.shape).stride())
    strides[dim] = 2**31 + 12
    numbers = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    no_reserve = 0x4000  # of Linux; the mmap module names it from Python 3.12 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = np.frombuffer(mmap.mmap(-1, 4 * numbers, flags=flags), dtype=np.float32)
    return torch.from_numpy(memory).as_strided(x.shape, strides).copy_(x)


FAR = [("dkf_fuse", 0, dim) for dim in range(4)] + [("latent_distance", 0, dim) for dim in range(3)]
FAR += [("expert_attention", *where) for where in ((0, 0), (0, 2), (1, 0), (1, 1))]
FAR += [("task_attention", 1, dim) for dim in range(3)]


@pytest.mark.parametrize("op, position, dim", FAR)
def test_offsets_beyond_two_to_the_31(op, position, dim):
    small = {"M": 2, "K": 2, "N": 2, "B": 2, "P": 2, "Q": 2, "L": 2, "H": 1, "d": 2, "T": 1}
    sizes = {**SIZES[op], **{k: v for k, v in small.items() if k in SIZES[op]}}
    args = list(to_dtype(OPS[op].make(torch.Generator().manual_seed(0), **sizes), torch.float32))
    grad = torch.randn_like(OPS[op].reference(*args))
    out, grads = run(op, args, grad)
    args[position] = far(args[position], dim)
    assert args[position].stride(dim) > 2**31 and is_float(args[position])
    far_out, far_grads = run(op, args, grad)
    for got, want in zip([far_out, *far_grads], [out, *grads], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gates", ["BKH", "none"])
def test_empty_batches(op, gates):
    sizes = dict(SIZES[op], **{"M" if op in ("latent_distance", "expansion_distances") else "B": 0})
    if op == "expert_attention":
        sizes["gates"] = gates
    args = to_dtype(OPS[op].make(torch.Generator().manual_seed(0), **sizes), torch.float32)
    like = OPS[op].reference(*args)
    out, grads = run(op, args, torch.ones_like(like))
    assert out.shape == like.shape and all(not g.any() for g in grads)
