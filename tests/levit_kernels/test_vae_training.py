"""The VAE's training loss with its gradients: every backend against autograd of the formula in float64."""

import pytest
import torch

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.vae_training import vae_training_gradients, vae_training_loss

NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
)
BACKENDS = [NATIVE, "torch", "reference"]
SIZES = {  # B, F, h1, h2, L, g1, g2
    "mnist": (64, 784, 200, 200, 50, 200, 200),
    "odd": (5, 31, 17, 9, 5, 8, 13),
    "lanes": (33, 70, 65, 64, 66, 63, 1),
    "vectors": (48, 40, 25, 12, 13, 11, 30),
    "ones": (1, 1, 1, 1, 1, 1, 1),
}


def arguments(name, dtype, seed=0):
    batch, pixels, h1, h2, latent, g1, g2 = SIZES[name]
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for out, inputs in ((h1, pixels), (h2, h1), (latent, h2), (latent, h2), (g1, latent), (g2, g1), (pixels, g2)):
        weights.append(torch.randn(out, inputs, generator=generator) * inputs**-0.5)
        weights.append(0.3 * torch.randn(out, generator=generator))
    images, noise = torch.randn(batch, pixels, generator=generator), torch.randn(batch, latent, generator=generator)
    return images.to(dtype), [w.to(dtype).requires_grad_() for w in weights], 0.5, noise.to(dtype)


def formula(images, weights, beta, noise, kink=0.0):
    """With the slope of the ReLU on the wrong side of its kink for numbers nearer to it than `kink`."""
    w1, b1, w2, b2, w_mu, b_mu, w_ls, b_ls, w3, b3, w4, b4, w5, b5 = weights
    hidden = torch.tanh(torch.tanh(images @ w1.T + b1) @ w2.T + b2)
    mu, log_sigma = hidden @ w_mu.T + b_mu, (hidden @ w_ls.T + b_ls).clamp(-8, 4)
    hidden = torch.tanh((mu + log_sigma.exp() * noise) @ w3.T + b3) @ w4.T + b4
    decoded = torch.where(hidden.abs() < kink, -torch.relu(-hidden), torch.relu(hidden)) @ w5.T + b5
    kl = 0.5 * (mu**2 + torch.exp(2 * log_sigma) - 1 - 2 * log_sigma).sum(1)
    return (((decoded - images) ** 2).sum(1) + beta * kl).mean()


def exact(images, weights, beta, noise, kink=0.0):
    weights = [w.detach().double().requires_grad_() for w in weights]
    loss = formula(images.double(), weights, beta, noise.double(), kink)
    return loss.detach(), torch.autograd.grad(loss, weights)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_loss_and_gradients_are_those_of_float64(name, backend, dtype, tolerance):
    args = arguments(name, dtype)
    with use_backend(backend):
        loss = vae_training_loss(*args)
        gradients = torch.autograd.grad(3 * loss, args[1])
    expected, expected_gradients = exact(*args)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=tolerance, atol=0)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert one.dtype == dtype and (one / 3 - other).norm() <= tolerance * (other.norm() + 1e-3)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_without_a_graph_are_the_same_bits(name, backend):
    args = arguments(name, torch.float32)
    with use_backend(backend):
        found = vae_training_gradients(*args)
        loss = vae_training_loss(*args)
    if backend != "cpu":
        assert found is None
        return
    assert all(torch.equal(a, b) for a, b in zip(found, [loss, *torch.autograd.grad(loss, args[1])], strict=True))
    assert not any(x.requires_grad for x in found)
    assert torch.is_grad_enabled() and all(weight.grad is None for weight in args[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_beyond_the_clamp_log_sigma_gets_no_gradient(backend):
    images, weights, beta, noise = arguments("odd", torch.float64)
    with torch.no_grad():
        weights[7].copy_(torch.tensor([-20.0, 0, 20, -7.9, 3.9]))
        weights[6].zero_()
    with use_backend(backend):
        loss = vae_training_loss(images, weights, beta, noise)
        by_bias = torch.autograd.grad(loss, weights[7])[0]
    expected, gradients = exact(images, weights, beta, noise)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
    assert by_bias[0] == by_bias[2] == 0 and by_bias[[1, 3, 4]].all()
    torch.testing.assert_close(by_bias, gradients[7], rtol=1e-10, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_one(backend):
    images, weights, beta, noise = arguments("odd", torch.float32)
    images[1, 3] = torch.nan
    with use_backend(backend):
        assert vae_training_loss(images, weights, beta, noise).isnan()


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_any_number_of_threads_gives_the_same_bits():
    args, before, seen = arguments("mnist", torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with use_backend("cpu"):
                loss = vae_training_loss(*args)
            seen.append([loss.detach(), *torch.autograd.grad(loss, args[1])])
    finally:
        torch.set_num_threads(before)
    for others in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], others, strict=True))


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_strides_frozen_weights_and_a_second_backward():
    images, weights, beta, noise = arguments("odd", torch.float64)
    expected, gradients = exact(images, weights, beta, noise)
    weights[0].requires_grad_(False)
    turned = images.t().contiguous().t()
    loss = vae_training_loss(turned, [w.t().contiguous().t() if w.dim() == 2 else w for w in weights], beta, noise)
    assert loss == vae_training_loss(images, weights, beta, noise)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
    loss.backward(retain_graph=True)
    assert weights[0].grad is None
    torch.testing.assert_close(weights[1].grad, gradients[1], rtol=1e-11, atol=1e-13)
    with pytest.raises(RuntimeError, match="was differentiated before"):
        loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(vae_training_loss(images, weights, beta, noise), expected)


@pytest.mark.parametrize("op", [vae_training_loss, vae_training_gradients])
def test_refusals(op):
    name = op.__name__
    images, weights, beta, noise = arguments("odd", torch.float32)
    with pytest.raises(ValueError, match=rf"{name}: noise must have shape \[B=5, L=5\], got \[4, 5\]"):
        op(images, weights, beta, noise[1:])
    with pytest.raises(ValueError, match=f"{name}: images must have B >= 1"):
        op(images[:0], weights, beta, noise[:0])
    with pytest.raises(TypeError, match=f"{name}: weights.w1 must be torch.float32 like images"):
        op(images, [w.double() for w in weights], beta, noise)
    with pytest.raises(ValueError, match=f"{name}: beta must be finite, got inf"):
        op(images, weights, float("inf"), noise)
