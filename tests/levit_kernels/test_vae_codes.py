"""vae_codes: every backend against NumPy, one image to several blocks, odd sizes, and what it refuses."""

import numpy as np
import pytest
import torch
from op_cases import OPS

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.vae_codes import vae_codes

SIZES = {
    "mnist": dict(M=10, K=3, F=784, h1=200, h2=200, L=50),
    "one": dict(M=1, K=2, F=784, h1=200, h2=200, L=50),
    "odd": dict(M=7, K=3, F=31, h1=17, h2=9, L=5),
    "ones": dict(M=1, K=1, F=1, h1=1, h2=1, L=1),
    "many": dict(M=40, K=2, F=33, h1=16, h2=20, L=8),
    "blocks": dict(M=600, K=2, F=33, h1=16, h2=20, L=8),
}


def arguments(name, dtype, layout="linear"):
    images, encoder, query, noise = OPS["expansion_distances"].make(torch.Generator().manual_seed(5), **SIZES[name])
    if layout == "linear":
        encoder = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x for x in encoder]
    return images.to(dtype), [x.to(dtype) for x in encoder], noise.to(dtype)


def oracle(images, encoder, noise):
    images, noise = images.double().numpy(), noise.double().numpy()
    w1, b1, w2, b2, w_mu, b_mu, w_ls, b_ls = (x.double().numpy() for x in encoder)
    codes = []
    for k, epsilon in enumerate(noise):
        hidden = np.tanh(np.tanh(images @ w1[k] + b1[k]) @ w2[k] + b2[k])
        codes.append(hidden @ w_mu[k] + b_mu[k] + np.exp(np.clip(hidden @ w_ls[k] + b_ls[k], -8, 4)) * epsilon)
    return torch.tensor(np.stack(codes))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("layout", ["linear", "dense"])
@pytest.mark.parametrize("name", SIZES)
def test_against_numpy(name, layout, backend, dtype, tolerance):
    if backend == "cpu" and cpu.unavailable():
        pytest.skip(f"native kernels: {cpu.unavailable()}")
    args = arguments(name, dtype, layout)
    with use_backend(backend):
        codes = vae_codes(*args)
    assert codes.dtype == dtype
    torch.testing.assert_close(codes.double(), oracle(*args), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_the_native_one_gives_the_same_bits_for_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(cpu, "composed_codes", None)
    args, before, seen = arguments("blocks", torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(vae_codes(*args))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_large_and_missing_numbers(backend):
    if backend == "cpu" and cpu.unavailable():
        pytest.skip(f"native kernels: {cpu.unavailable()}")
    images, encoder, noise = arguments("odd", torch.float64)
    images[0] = 1e6  # tanh saturates
    images[1, 3] = torch.nan
    with use_backend(backend):
        codes = vae_codes(images, encoder, noise)
    assert codes[:, 1].isnan().all() and codes[:, [0, *range(2, 7)]].isfinite().all()
    torch.testing.assert_close(codes[:, 0], oracle(images, encoder, noise)[:, 0], rtol=1e-12, atol=1e-12)


def test_no_images():
    images, encoder, noise = arguments("odd", torch.float32)
    assert vae_codes(images[:0], encoder, noise[:, :0]).shape == (3, 0, 5)


def test_refusals():
    images, encoder, noise = arguments("odd", torch.float32)
    with pytest.raises(ValueError, match=r"vae_codes: noise must have shape \[K=3, M=7, L=5\], got \[3, 6, 5\]"):
        vae_codes(images, encoder, noise[:, 1:])
    with pytest.raises(TypeError, match="vae_codes: noise must be torch.float32 like images, got torch.float64"):
        vae_codes(images, encoder, noise.double())
    with pytest.raises(ValueError, match="vae_codes: encoder must hold 8 tensors"):
        vae_codes(images, encoder[:6], noise)
