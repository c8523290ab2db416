"""latent_distance's CUDA kernels, emulated, against the reference in float64 and its autograd."""

import pytest
import torch
from emulator import DTYPES

from levit_kernels.cuda import latent_distance as cuda
from levit_kernels.latent_distance import latent_distance_reference

SIZES = {"published": (3, 150, 50), "long codes": (2, 9, 300), "odd": (2, 7, 3), "one": (1, 1, 1)}  # K, M, L


def backward(grad, codes, query):
    return cuda.latent_distance_backward(grad, codes, query, [True, True])


def case(dtype, size):
    experts, samples, latent = SIZES[size]
    return torch.randn(experts, samples, latent).to(dtype), torch.randn(samples, latent).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_distance(emulator, size, dtype):
    codes, query = case(dtype, size)
    expected = latent_distance_reference(codes.double(), query.double())
    torch.testing.assert_close(cuda.latent_distance(codes, query), expected.float())


def assert_gradients(codes, query):
    out, pull = torch.func.vjp(latent_distance_reference, codes.double(), query.double())
    grad = torch.randn(out.shape)
    for got, expected in zip(backward(grad, codes, query), pull(grad.double()), strict=True):
        torch.testing.assert_close(got, expected.to(got.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gradients(emulator, size, dtype):
    assert_gradients(*case(dtype, size))


def test_gradient_at_distance_zero_is_zero(emulator):
    codes, query = case(torch.float32, "odd")
    codes[1] = query
    by_codes, by_query = backward(torch.tensor([0.0, 1.0]), codes, query)
    assert not by_codes.any() and not by_query.any()


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    codes, query = case(torch.float32, "published")
    expected = latent_distance_reference(codes.double(), query.double())
    torch.testing.assert_close(cuda.latent_distance(codes, query), expected.float())
    assert_gradients(codes, query)
    assert not emulator.switches("latent_distance.cuh"), "no thread of these kernels waits for another"
