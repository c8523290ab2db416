"""The native elbo_loss: weights in nn.Linear's layout; another layout goes to the composed op."""

from types import SimpleNamespace

import pytest
import torch
from op_cases import OPS, run_with_vectors, to_dtype

from levit_kernels import elbo_loss, use_backend
from levit_kernels.backends import cpu
from levit_kernels.elbo_loss import elbo_loss_reference

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
SIZES = {
    "mnist": dict(B=1, K=4, F=784, h1=200, h2=200, L=50, g1=200, g2=200),
    "mnist-samples": dict(B=2, K=2, F=784, h1=200, h2=200, L=50, g1=200, g2=200, S=3),
    "odd": dict(B=6, K=3, F=31, h1=17, h2=9, L=5, g1=8, g2=13),
    "odd-samples": dict(B=2, K=5, F=70, h1=65, h2=64, L=66, g1=63, g2=1, S=2),
    "lanes": dict(B=33, K=2, F=40, h1=25, h2=12, L=13, g1=11, g2=30),
    "few-many-codes": dict(B=3, K=2, F=40, h1=25, h2=12, L=13, g1=11, g2=30, S=7),
    "blocks": dict(B=300, K=2, F=21, h1=9, h2=8, L=3, g1=5, g2=7, S=2),
    "a-block-of-one": dict(B=2, K=1, F=21, h1=9, h2=8, L=3, g1=5, g2=7, S=300),
    "ones": dict(B=1, K=1, F=1, h1=1, h2=1, L=1, g1=1, g2=1, S=1),
}


def linear_layout(x, dtype):
    """The same weights as views of [K, out, in]."""
    x = x.to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x


def arguments(name, dtype, seed=0):
    args = OPS["elbo_loss"].make(torch.Generator().manual_seed(seed), **SIZES[name])
    images, encoder, decoder, beta, noise = args
    encoder, decoder = ([linear_layout(x, dtype) for x in weights] for weights in (encoder, decoder))
    return images.to(dtype), encoder, decoder, beta, None if noise is None else noise.to(dtype)


@pytest.fixture(autouse=True)
def native_only(monkeypatch):
    def fail(*_):
        raise AssertionError("the composed op was called")

    monkeypatch.setattr(cpu, "composed_elbo_loss", SimpleNamespace(elbo_loss=fail))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", SIZES)
def test_against_the_reference_in_float64(name, dtype, tolerance):
    for seed in range(3):
        args = arguments(name, dtype, seed)
        with use_backend("cpu"):
            losses = elbo_loss(*args)
        images, encoder, decoder, beta, noise = args
        exact = elbo_loss_reference(
            images.double(),
            [x.double() for x in encoder],
            [x.double() for x in decoder],
            beta,
            None if noise is None else noise.double(),
        )
        assert losses.dtype == dtype
        torch.testing.assert_close(losses.double(), exact, rtol=tolerance, atol=tolerance)


def test_any_number_of_threads_gives_the_same_bits():
    args, before, seen = arguments("mnist", torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(elbo_loss(*args))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_pass_through(value):
    args = arguments("odd", torch.float64)
    args[0][2, 3] = value
    losses, expected = elbo_loss(*args), elbo_loss_reference(*args)
    assert torch.equal(losses.isnan(), expected.isnan()) and torch.equal(losses.isinf(), expected.isinf())
    torch.testing.assert_close(losses, expected, equal_nan=True)


def test_other_layouts_are_left_to_torch():
    images, encoder, decoder, beta, noise = arguments("odd", torch.float32)
    with pytest.raises(AssertionError, match="the composed op was called"):
        elbo_loss(images, [x.contiguous() for x in encoder], decoder, beta, noise)


@pytest.mark.parametrize("name", SIZES)
def test_bfloat16(name):
    args = arguments(name, torch.bfloat16)
    losses, exact = elbo_loss(*args), elbo_loss_reference(*to_dtype(args, torch.float64))
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact, rtol=0.03, atol=0.03)


def test_bfloat16_does_not_depend_on_the_batch():
    images, *rest = arguments("lanes", torch.bfloat16)
    together = elbo_loss(images, *rest)
    has_dots = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    exact = has_dots and torch.backends.cpu.get_cpu_capability() == "AVX512"  # else as float32, which rounds by batch
    for i in (0, 7, 32):
        alone = elbo_loss(images[i : i + 1], *rest)[0]
        torch.testing.assert_close(alone, together[i], rtol=0 if exact else 1e-5, atol=0)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bfloat16_without_the_instruction(capability):
    code = "from test_elbo_loss_native import *\nfor name in SIZES:\n    test_bfloat16(name)"
    run_with_vectors(capability, code)
