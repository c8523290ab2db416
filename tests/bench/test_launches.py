"""The count of kernels: of declared launches, not of what a machine without a GPU happens to run."""

import pytest

import levit
from bench import launches

PUBLISHED = dict(criterion="latent", gamma=1e9, routing="vae", calibration=False)


def config():
    return levit.LEViTConfig.preset("digits", memory_size=80, updates_per_batch=1, **PUBLISHED)


def test_fused_kernels_do_not_grow_with_the_experts_and_the_reference_s_do():
    fused = [launches.of_a_step("fused", config(), k).kernels for k in (2, 4)]
    assert fused[0] == fused[1]
    assert fused[0]["expert_attention: forward"] == 2 and fused[0]["dkf_fuse: fuse"] == 1
    assert fused[0]["latent_distance: distance"] == 1 and fused[0]["_fused_adam_"] == 1
    reference = [launches.of_a_step("reference", config(), k).kernels.total() for k in (2, 3, 4)]
    assert reference[2] - reference[1] == reference[1] - reference[0] > 20


@pytest.mark.full
def test_a_step_with_32_experts_starts_a_tenth_of_the_kernels():
    assert launches.main(["--experts", "32"], show=lambda line: None) == 0


def test_a_step_waits_for_its_input_and_for_its_decision():
    """On a GPU the values that are read after one transfer cost nothing more."""
    waits = launches.of_a_step("fused", config(), 3).waits
    assert set(waits) == {"_local_scalar_dense"} and waits.total() <= 6


def test_the_count_leaves_the_backends_as_they_were():
    before = launches.registry.backends()["triton"]
    launches.of_a_step("fused", config(), 2)
    assert launches.registry.backends()["triton"] is before
