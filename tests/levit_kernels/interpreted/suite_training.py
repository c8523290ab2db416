"""What a step of training is made of, on the triton backend: values and gradients against float64."""

import pytest
import test_batch_norm_fold as fold
import test_head_training as head
import test_position_noise as noise
import test_vae_codes as codes
import test_vae_training as vae
import torch
from suite_memory import GUARD, guarded
from torch.utils._pytree import tree_map_only

from levit_kernels import use_backend
from levit_kernels.head_training import head_training_loss
from levit_kernels.position_noise import position_noise
from levit_kernels.vae_codes import vae_codes
from levit_kernels.vae_training import vae_training_loss

FULL = pytest.mark.full
HALVES = [torch.bfloat16, torch.float16]


def errors(found, exact):
    return [
        float((one.double() - other).norm() / (other.norm() + 1e-3)) for one, other in zip(found, exact, strict=True)
    ]


def vae_loss(args, backend):
    with use_backend(backend):
        loss = vae_training_loss(*args)
        return [3 * loss.detach(), *torch.autograd.grad(3 * loss, args[1])]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", ["odd", "lanes", "ones", pytest.param("mnist", marks=FULL)])
def test_vae(name, dtype):
    args = vae.arguments(name, dtype)
    exact = tripled(*vae.exact(*args))
    found = vae_loss(args, "triton")
    assert all(x.dtype == dtype for x in found)
    # Which of the few numbers next to the ReLU's kink get its slope is a matter of rounding, in 16 bits.
    near = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 8
    luck = max(errors(tripled(*vae.exact(*args, kink=near)), exact))
    assert max(errors(found, exact)) <= max(5e-6, 2 * max(errors(vae_loss(args, "reference"), exact))) + luck


def tripled(value, gradients):
    return [3 * x for x in (value, *gradients)]


def head_loss(args, backend):
    features, labels, weights = args
    with use_backend(backend):
        loss, *statistics = head_training_loss(features, labels, weights)
        gradients = torch.autograd.grad(3 * loss, [features, *weights])
    assert not any(x.requires_grad for x in statistics)
    return [3 * loss.detach(), *gradients, *statistics]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    "name", ["odd", "lanes", "no-hidden", *(pytest.param(n, marks=FULL) for n in ("mnist", "cifar"))]
)
def test_head(name, dtype):
    args = head.arguments(name, dtype)
    value, gradients, statistics = head.exact(*args)
    exact = [*(3 * x for x in (value, *gradients)), *statistics]
    found = head_loss(args, "triton")
    assert all(x.dtype == dtype for x in found)
    assert max(errors(found, exact)) <= max(3e-5, 2 * max(errors(head_loss(args, "reference"), exact)))


def test_head_without_a_label_and_with_a_nan():
    features, labels, weights = head.arguments("odd", torch.float32)
    loss, *gradients = head_loss((features, torch.full_like(labels, -1), weights), "triton")[: 2 + len(weights)]
    assert loss == 0 and not any(x.any() for x in gradients)
    with torch.no_grad():
        features[1, 3] = torch.nan
    assert head_loss((features, labels, weights), "triton")[0].isnan()


@pytest.mark.parametrize("layout", ["linear", "dense"])
@pytest.mark.parametrize("name", ["odd", "ones", pytest.param("blocks", marks=FULL), pytest.param("one", marks=FULL)])
def test_codes(name, layout):
    args = codes.arguments(name, torch.float32, layout)
    with use_backend("triton"):
        found = vae_codes(*args)
    torch.testing.assert_close(found.double(), codes.oracle(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("name", ["odd", "wide", "few", "ones", pytest.param("mnist", marks=FULL)])
def test_fold(name, dtype, tolerance):
    fold.check(fold.arguments(name, dtype), "triton", dtype, tolerance)


@pytest.mark.parametrize("offset, contrast", [(0.9, 0.01), (0.0, 1e-4)], ids=["far off", "dark"])
def test_fold_is_as_exact_as_batch_norm(offset, contrast):
    fold.check(fold.arguments("wide", torch.float32, offset, contrast), "triton", torch.float32, 2e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_noise(dtype, tolerance):
    noise.check("triton", dtype, tolerance)


def fold_outcome(args, backend):
    with use_backend(backend):
        return fold.outcome(*args)[0]


def codes_and_noise(args, backend):
    with use_backend(backend):
        return [vae_codes(*args), position_noise(torch.arange(3), torch.arange(5), 7, 1)]


GUARDED = {
    "vae": (vae_loss, vae.arguments("odd", torch.float32)),
    "head": (head_loss, head.arguments("odd", torch.float32)),
    "fold": (fold_outcome, fold.arguments("odd", torch.float32)),
    "codes": (codes_and_noise, codes.arguments("odd", torch.float32)),
}


@pytest.mark.parametrize("name", GUARDED)
def test_nothing_beside_the_arguments_is_read_and_nothing_beside_the_results_written(name, monkeypatch):
    run, args = GUARDED[name]
    expected, rooms, new_empty = run(args, "triton"), [], torch.Tensor.new_empty

    def guarded_empty(self, *shape, **options):
        like = new_empty(self, *shape, **options)
        room, view = guarded(like)
        rooms.append((room, like.numel()))
        return view

    def guard(x):
        return guarded(x)[1].copy_(x.detach()).requires_grad_(x.requires_grad)

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded_empty)
    found = run(tree_map_only(torch.Tensor, guard, args), "triton")
    monkeypatch.undo()
    assert len(rooms) >= 4
    for room, numbers in rooms:
        for zone in (room[:GUARD], room[GUARD + numbers :]):
            assert zone.isnan().all() if room.is_floating_point() else (zone == -1).all()
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
