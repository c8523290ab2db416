"""The VAE's training loss with its backward pass by hand, against autograd in float64."""

import pytest
import torch

from levit_kernels import _vae
from levit_kernels.vae_training import vae_training_loss, vae_training_loss_reference

SIZES = {
    "mnist": dict(B=6, F=784, h1=200, h2=200, L=50, g1=200, g2=200),
    "odd": dict(B=7, F=31, h1=17, h2=9, L=5, g1=8, g2=13),
    "ones": dict(B=1, F=1, h1=1, h2=1, L=1, g1=1, g2=1),
}


def draw(dtype, B, scale=1.0, **sizes):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def weights(patterns):
        for pattern in patterns.values():
            shape = [sizes[letter] for letter in pattern.split()[1:]][::-1]
            yield (normal(*shape) * (scale * shape[-1] ** -0.5 if len(shape) == 2 else 0.3)).requires_grad_()

    encoder, decoder = list(weights(_vae.ENCODER)), list(weights(_vae.DECODER))
    return normal(B, sizes["F"]), encoder, decoder, 0.5, normal(B, sizes["L"])


def differentiate(function, args, dtype=None):
    images, encoder, decoder, beta, noise = args
    if dtype is not None:
        images, noise = images.to(dtype), noise.to(dtype)
        encoder, decoder = ([x.detach().to(dtype).requires_grad_() for x in part] for part in (encoder, decoder))
    loss = function(images, encoder, decoder, beta, noise)
    return [loss.detach(), *torch.autograd.grad(3 * loss, [*encoder, *decoder])]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_float64(sizes):
    args = draw(torch.float64, **sizes)
    got, want = (differentiate(f, args) for f in (vae_training_loss, vae_training_loss_reference))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_clamped_log_sigma_gets_no_gradient():
    args = draw(torch.float64, scale=30.0, **SIZES["odd"])
    got, want = (differentiate(f, args) for f in (vae_training_loss, vae_training_loss_reference))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_float32_is_as_exact_as_plain_torch(sizes):
    args = draw(torch.float32, **sizes)
    exact = differentiate(vae_training_loss_reference, args, torch.float64)
    got, plain = (differentiate(f, args) for f in (vae_training_loss, vae_training_loss_reference))
    for x, y, z in zip(got, plain, exact, strict=True):
        assert (x - z).norm() <= 2 * (y - z).norm() + 1e-6 * z.norm()


def test_differentiating_twice_says_so():
    images, encoder, decoder, beta, noise = draw(torch.float64, **SIZES["odd"])
    loss = vae_training_loss(images, encoder, decoder, beta, noise)
    (grad,) = torch.autograd.grad(loss, encoder[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="vae_training_loss is differentiable once"):
        grad.sum().backward()
