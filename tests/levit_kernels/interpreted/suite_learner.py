"""How many kernels a step of Algorithm 1 starts on a GPU: every dispatched operator that is no view and no allocation,
and within the ops of levit_kernels what they start themselves.
"""

import importlib
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import levit
import levit_kernels
from levit_kernels.backends import registry
from levit_kernels.triton import launch

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view")
OPS = ("dkf_fuse", "elbo_loss", "expansion_distances", "expert_attention", "latent_distance")
MODULES = [importlib.import_module(f"levit_kernels.{op}") for op in OPS]


class Launches(TorchDispatchMode):
    """Counts what reaches the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket.__name__
        self.count += func.namespace != "levit_kernels" and not is_view and name not in ALLOCATIONS
        return out


@contextmanager
def counting():
    """A Launches mode that also looks into the ops of levit_kernels."""
    mode, original = Launches(), registry.run

    def run(op, *args):
        with mode:
            return original(op, *args)

    def listener(started):
        mode.count += 1
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


def launches_of_a_step(kind, experts):
    """Of one batch observed with a full memory: one update, one check of the rule, which does not fire."""
    published = dict(criterion="latent", gamma=1e9, routing="vae", calibration=False)
    cfg = levit.LEViTConfig.preset("digits", memory_size=70, updates_per_batch=1, **published)
    model = (levit.reference.LEViT if kind == "reference" else levit.LEViT)(cfg)
    for _ in range(experts - 1):
        model.add_expert()
    learner = levit.Learner(model)
    generator = torch.Generator().manual_seed(0)

    def batch(size):
        images = torch.rand(size, cfg.channels, cfg.image_size, cfg.image_size, generator=generator)
        return images, torch.randint(cfg.num_classes, (size,), generator=generator)

    with levit_kernels.use_backend("triton" if kind == "fused" else "reference"):
        learner.observe(*batch(60))
        with counting() as mode:
            event = learner.observe(*batch(10))
    assert event.loss is not None and len(event.distances) == experts - 1 and not event.expanded
    return mode.count


@pytest.mark.full
def test_a_step_with_32_experts_starts_a_tenth_of_the_kernels():
    reference, fused = (launches_of_a_step(kind, 32) for kind in ("reference", "fused"))
    print(f"launches of a step, K = 32: reference {reference}, fused {fused}")
    assert fused <= reference / 10


def test_the_fused_step_starts_no_more_kernels_with_more_experts():
    assert launches_of_a_step("fused", 3) == launches_of_a_step("fused", 2)
