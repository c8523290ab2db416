"""How many kernels a step of Algorithm 1 starts on a GPU: the rules of `bench.launches`, on a step that really runs."""

import importlib
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import levit
from bench import launches
from levit_kernels import use_backend
from levit_kernels.backends import registry
from levit_kernels.triton import launch

REGISTERED = ("dkf_fuse", "elbo_loss", "expansion_distances", "expert_attention", "latent_distance")
MODULES = [importlib.import_module(f"levit_kernels.{op}") for op in REGISTERED]


class Launches(launches.Launches):
    """Without what the interpreter does to get at a tensor's memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "set_":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def counting():
    """A Launches mode that also looks into the ops that torch's dispatcher hides."""
    mode, original = Launches(), registry.run

    def run(op, *args):
        with mode:
            return original(op, *args)

    def listener(started):
        mode.kernels[started.kernel.__name__] += 1
        return True

    patches = [mock.patch.object(module, "run", run) for module in MODULES]
    for patch in patches:
        patch.start()
    try:
        with launch.listening(listener), mode:
            yield mode
    finally:
        for patch in patches:
            patch.stop()


def config():
    """Small, since launches do not depend on it; room for an update before the counted one: Adam gets its memory."""
    published = dict(criterion="latent", gamma=1e9, routing="vae", calibration=False)
    return levit.LEViTConfig.preset("digits", memory_size=20, train_batch=8, updates_per_batch=1, **published)


def launches_of_a_step(kind, experts):
    return launches.of_a_step(kind, config(), experts, counting).kernels.total()


@pytest.mark.full
def test_a_step_with_32_experts_starts_a_tenth_of_the_kernels():
    reference, fused = (launches_of_a_step(kind, 32) for kind in ("reference", "fused"))
    print(f"launches of a step, K = 32: reference {reference}, fused {fused}")
    assert fused <= reference / 10


def test_the_fused_step_starts_no_more_kernels_with_more_experts():
    assert launches_of_a_step("fused", 3) == launches_of_a_step("fused", 2)


def test_the_count_without_running_them_is_the_same():
    running = launches.of_a_step("fused", config(), 2, counting).kernels
    declared = launches.of_a_step("fused", config(), 2).kernels
    assert running.total() == declared.total(), (running, declared)


def test_steps_are_those_of_the_reference():
    events = []
    for model, backend in ((levit.LEViT, "triton"), (levit.reference.LEViT, "reference")):
        model = model(config())
        model.add_expert()
        learner = levit.Learner(model)
        generator = torch.Generator().manual_seed(0)
        with use_backend(backend):
            for _ in range(3):
                images = torch.rand(10, 1, 8, 8, generator=generator)
                last = learner.observe(images, torch.randint(10, (10,), generator=generator))
        events.append(last)
    assert abs(events[0].loss / events[1].loss - 1) < 1e-5
    torch.testing.assert_close(events[0].distances, events[1].distances, rtol=1e-4, atol=0)
