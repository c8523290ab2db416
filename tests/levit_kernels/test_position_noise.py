"""The noise of positions in the stream against the same generator in NumPy's unsigned integers."""

import numpy as np
import pytest
import torch

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.position_noise import position_noise


def splitmix(x):
    """One output of the published generator [Steele, Lea and Flood 2014] from state x, its lowest 63 bits."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) & np.uint64(2**63 - 1)


def oracle(positions, experts, latent, seed):
    def unsigned(x):
        return np.array(x % 2**64, dtype=np.uint64)

    with np.errstate(over="ignore"):
        start = unsigned(seed * 0xA0761D6478BD642F) + experts.astype(np.uint64)
        key = splitmix(splitmix(start)[:, None] + positions.astype(np.uint64))
        key = key[:, :, None] + np.arange(latent, dtype=np.uint64) * unsigned(0xD1B54A32D192ED03)
        angle = splitmix(key + unsigned(0x8CB92BA72F3D8DD7))
    radius, angle = ((x >> np.uint64(10)).astype(np.float64) + 0.5 for x in (splitmix(key), angle))
    return np.sqrt(-2 * np.log(radius * 2.0**-53)) * np.cos(2 * np.pi * angle * 2.0**-53)


def check(backend, dtype, tolerance):
    positions, experts = torch.tensor([0, 7, 10**12, 3])[::2], torch.tensor([-1, 0, 5])
    for seed in (0, 3, 10**9, -2, 2**63 + 5):
        with use_backend(backend):
            found = position_noise(positions, experts, 5, seed, dtype)
        expected = torch.from_numpy(oracle(positions.numpy(), experts.numpy(), 5, seed))
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        assert found.dtype == dtype
    assert position_noise(positions[:0], experts, 5, 0).shape == (3, 0, 5)


@pytest.mark.parametrize("backend", [None, "torch", "reference", "cpu"])
def test_the_numbers_are_those_of_the_generator(backend):
    check(backend, torch.float64, 1e-14)
    check(backend, torch.float32, 1e-6)


@pytest.mark.parametrize("backend", [None, "torch", "reference", "cpu"])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_row_has_its_own_numbers_whoever_makes_them(threads, backend):
    positions, experts = torch.arange(700) * 3 + 1, torch.arange(7)
    expected = torch.from_numpy(oracle(positions.numpy(), experts.numpy(), 13, 5))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with use_backend(backend):
            found = position_noise(positions, experts, 13, 5, torch.float64)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_refusals():
    here = torch.arange(3)
    with pytest.raises(TypeError, match="position_noise: experts must be int64, got torch.int32"):
        position_noise(here, here.int(), 5, 0)
    with pytest.raises(ValueError, match=r"position_noise: positions must have one dimension, got \[1, 3\]"):
        position_noise(here[None], here, 5, 0)
    with pytest.raises(ValueError, match="position_noise: latent_dim must be at least 1, got 0"):
        position_noise(here, here, 0, 0)
    with pytest.raises(TypeError, match="position_noise: dtype must be floating point, got torch.int64"):
        position_noise(here, here, 5, 0, torch.int64)


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_the_kernel_itself_reads_nothing_that_is_not_there():
    here = torch.arange(3)
    for positions, experts, latent in ((here.int(), here, 5), (here, here[None], 5), (here, here, 0)):
        with pytest.raises(RuntimeError, match="position_noise: .* must be"):
            torch.ops.levit_native.position_noise(positions, experts, latent, 0)
