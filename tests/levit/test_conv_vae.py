"""The convolutional VAE through the kernels: losses and gradients are those of the plain module."""

import pytest
import torch
from helpers import random_images, small_config

import levit
from levit import reference
from levit.conv_vae import conv_vae_loss
from levit.vae import ConvVAE
from levit_kernels import use_backend


@pytest.mark.parametrize("codes", ["mean", "one each", "three for all"])
def test_loss_and_gradients_equal_the_modules(codes):
    cfg = small_config(vae="conv", latent_dim=7)
    torch.manual_seed(0)
    vae, images = ConvVAE(cfg).double(), random_images(cfg, 5).double()
    shape = {"mean": None, "one each": (5, 7), "three for all": (3, 1, 7)}[codes]
    noise = None if shape is None else torch.randn(shape).double()
    found, expected = conv_vae_loss(vae, images, noise), vae.loss(images, noise)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    weights = list(vae.parameters())
    for one, other in zip(
        torch.autograd.grad(found.mean(), weights), torch.autograd.grad(expected.mean(), weights), strict=True
    ):
        assert one.shape == other.shape and (one - other).norm() <= 1e-11 * (other.norm() + 1e-6)


def test_under_autocast_it_is_the_modules_too():
    cfg = small_config(vae="conv", latent_dim=7, route_samples=2, routing="vae")
    images, losses = random_images(cfg, 4).float(), []
    for kind in (reference.LEViT, levit.LEViT):
        model = kind(cfg)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model.elbo_loss(images).float())
            loss = model.training_loss(images, torch.zeros(4, dtype=torch.int64))
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)


def test_the_fused_model_asks_it_and_the_reference_does_not(monkeypatch):
    cfg = small_config(vae="conv", latent_dim=7, route_samples=2, routing="vae")
    asked = []
    monkeypatch.setattr("levit.model.conv_vae_loss", lambda *args: asked.append(args) or conv_vae_loss(*args))
    models = [kind(cfg).double() for kind in (reference.LEViT, levit.LEViT)]
    images = random_images(cfg, 4).double()
    plain, fused = (model.elbo_loss(images) for model in models)
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=0)
    generators = [torch.Generator().manual_seed(5) for _ in models]
    labels = torch.zeros(4, dtype=torch.int64)
    losses = [m.training_loss(images, labels, generator=g) for m, g in zip(models, generators, strict=True)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    with use_backend("reference"):
        models[1].elbo_loss(images)
    native = levit.model.has_kernel("strided_conv", images)
    assert len(asked) == (2 if native else 0)
