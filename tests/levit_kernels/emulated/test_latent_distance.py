"""latent_distance's CUDA kernels, emulated, against the reference in float64 and its autograd."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import pytest
import torch
from emulator import TYPES

from levit_kernels.latent_distance import latent_distance_reference

SIZES = {"published": (3, 150, 50), "long codes": (2, 9, 300), "odd": (2, 7, 3), "one": (1, 1, 1)}  # K, M, L


class Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "query")),
        ("samples", c_int64),
        *((name, c_int32) for name in ("experts", "latent", "type")),
        *((name, c_void_p) for name in ("partial", "out", "grad", "by_codes", "by_query")),
    ]


def prepare(emulator, codes, query):
    experts, samples, latent = codes.shape
    return Call(emulator.upload(codes), emulator.upload(query), samples, experts, latent, TYPES[codes.dtype])


def forward(emulator, codes, query):
    call, library = prepare(emulator, codes, query), emulator.library
    library.levit_latent_distance_partials.argtypes = [c_int64]
    partials = library.levit_latent_distance_partials(call.samples)
    call.partial = emulator.allocate((call.experts, partials), torch.float32)
    call.out = emulator.allocate((call.experts,), torch.float32)
    emulator.check(library.levit_latent_distance(ctypes.byref(call), None))
    return emulator.download(call.out, (call.experts,), torch.float32)


def backward(emulator, grad, codes, query):
    call = prepare(emulator, codes, query)
    call.grad = emulator.upload(grad)
    call.by_codes, call.by_query = (emulator.allocate(x.shape, x.dtype) for x in (codes, query))
    emulator.check(emulator.library.levit_latent_distance_backward(ctypes.byref(call), None))
    outputs = ((call.by_codes, codes), (call.by_query, query))
    return [emulator.download(address, x.shape, x.dtype) for address, x in outputs]


def case(dtype, size):
    experts, samples, latent = SIZES[size]
    return torch.randn(experts, samples, latent).to(dtype), torch.randn(samples, latent).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_distance(emulator, size, dtype):
    codes, query = case(dtype, size)
    expected = latent_distance_reference(codes.double(), query.double())
    torch.testing.assert_close(forward(emulator, codes, query), expected.float())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gradients(emulator, size, dtype):
    codes, query = case(dtype, size)
    out, pull = torch.func.vjp(latent_distance_reference, codes.double(), query.double())
    grad = torch.randn(out.shape)
    for got, expected in zip(backward(emulator, grad, codes, query), pull(grad.double()), strict=True):
        torch.testing.assert_close(got, expected.to(dtype))


def test_gradient_at_distance_zero_is_zero(emulator):
    codes, query = case(torch.float32, "odd")
    codes[1] = query
    by_codes, by_query = backward(emulator, torch.tensor([0.0, 1.0]), codes, query)
    assert not by_codes.any() and not by_query.any()


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    codes, query = case(torch.float32, "published")
    expected = latent_distance_reference(codes.double(), query.double())
    torch.testing.assert_close(forward(emulator, codes, query), expected.float())
    assert not emulator.switches("latent_distance.cuh"), "no thread of these kernels waits for another"
