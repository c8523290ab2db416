"""dkf_fuse's CUDA kernels, emulated, against the reference in float64 and its autograd."""

import pytest
import torch
from emulator import DTYPES, EmulatorError

from levit_kernels.cuda import dkf_fuse as cuda
from levit_kernels.dkf_fuse import dkf_fuse_reference

GATES = {"per expert": (4,), "per head": (4, 3), "per image": (5, 4, 1), "per image and head": (5, 4, 3)}
SIZES = {"published": (16, 300), "odd": (3, 21), "many blocks": (4, 1200)}  # N, E


def backward(grad, features, gates, index):
    return cuda.dkf_fuse_backward(grad, features, gates, index, [True, True])


def case(dtype, size, gates, indexed=True):
    tokens, width = SIZES[size]
    rows, index = (7, torch.tensor([3, 0, 6, 3, 3])) if indexed else (5, None)
    return torch.randn(rows, 4, tokens, width).to(dtype), torch.randn(GATES[gates]), index


def in_double(function, features, gates, index):
    return function(features.double(), gates.double(), index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "all rows"])
def test_sum(emulator, size, gates, dtype, indexed):
    args = case(dtype, size, gates, indexed)
    torch.testing.assert_close(cuda.dkf_fuse(*args), in_double(dkf_fuse_reference, *args).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_result_in_half_precision(emulator, dtype):
    features, gates, index = case(dtype, "published", "per head")
    out = cuda.dkf_fuse(features, gates.to(dtype), index)
    assert out.dtype == dtype
    expected = in_double(dkf_fuse_reference, features, gates.to(dtype), index)
    torch.testing.assert_close(out, expected.to(dtype))


def assert_gradients(features, gates, index):
    out, pull = torch.func.vjp(lambda f, g: dkf_fuse_reference(f, g, index), features.double(), gates.double())
    grad = torch.randn(out.shape)
    by_features, by_gates = backward(grad, features, gates, index)
    expected_features, expected_gates = pull(grad.double())
    torch.testing.assert_close(by_gates, expected_gates.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_features, expected_features.to(features.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("size", ["published", "odd"])
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "all rows"])
def test_gradients(emulator, size, gates, dtype, indexed):
    assert_gradients(*case(dtype, size, gates, indexed))


def test_zero_gates_drop_what_is_stored(emulator):
    features, gates, index = case(torch.bfloat16, "published", "per head")
    gates[1], gates[2, 0] = 0, 0
    expected = in_double(dkf_fuse_reference, features, gates, index)
    features[:, 1], features[:, 2, :, :100] = torch.nan, torch.inf
    torch.testing.assert_close(cuda.dkf_fuse(features, gates, index), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [-1, 7])
def test_rows_outside_the_store_are_refused(emulator, row):
    features, gates, index = case(torch.float32, "odd", "per expert")
    index[2] = row
    with pytest.raises(EmulatorError, match="assertion fails at dkf_fuse.cuh"):
        cuda.dkf_fuse(features, gates, index)


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    args = case(torch.float32, "published", "per image and head")
    torch.testing.assert_close(cuda.dkf_fuse(*args), in_double(dkf_fuse_reference, *args).float(), rtol=1e-5, atol=1e-5)
    assert_gradients(*args)
    assert not emulator.switches("dkf_fuse.cuh"), "no thread of these kernels waits for another"
