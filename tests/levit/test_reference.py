"""levit.reference, equation by equation, against NumPy float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import VARIANTS, build, random_images, random_labels, small_config
from oracle import Oracle

from levit import reference
from levit.noise import fixed_noise, position_noise

EXPERTS = 3


@pytest.fixture(params=VARIANTS, ids=str)
def model(request):
    return build(reference.LEViT, small_config(**VARIANTS[request.param]), EXPERTS)


@pytest.fixture
def images(model):
    return random_images(model.cfg, 6)


def close(actual, expected):
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-10, atol=1e-11)


def test_equation_1_patches(model, images):
    expected = np.array([Oracle(model).patches(image) for image in images.numpy()])
    close(reference.patches(images, model.cfg.patch_size), expected)


vision_only = pytest.mark.parametrize("model", [name for name in VARIANTS if "dnn" not in name], indirect=True)


@vision_only
def test_equation_2_tokens(model, images):
    parts = reference.patches(images, model.cfg.patch_size)
    for k in range(EXPERTS):
        close(reference.tokens(model.experts[k], parts), Oracle(model).tokens(k, images.numpy()))


@vision_only
def test_equation_2_tokens_with_batch_statistics(model, images):
    oracle, parts = Oracle(model), reference.patches(images, model.cfg.patch_size)
    close(reference.tokens(model.active, parts, batch_statistics=True), oracle.tokens(2, images.numpy(), True))


def test_equations_3_and_4_features(model, images):
    expected = np.stack([Oracle(model).features(k, images.numpy()) for k in range(EXPERTS)], axis=1)
    close(model.features(images), expected)


def test_equations_5_to_9_logits(model, images):
    for k in range(EXPERTS):
        close(model.forward_expert(images, k), Oracle(model).logits(k, images.numpy()))


def test_equation_7_gates_start_uniform():
    model = reference.LEViT(small_config()).double()
    model.add_expert()
    model.add_expert()
    close(model.gates(2), np.full(3, 1 / 3))


CONV = dict(vae="conv", image_size=32, patch_size=8, latent_dim=4)


@pytest.mark.parametrize("vae", ["mlp", "conv"])
@pytest.mark.parametrize("draws", [0, 3])
def test_vae_loss_and_route(draws, vae):
    overrides = CONV if vae == "conv" else {}
    model = build(reference.LEViT, small_config(route_samples=draws, **overrides), EXPERTS)
    images, oracle = random_images(model.cfg, 6), Oracle(model)
    noise = np.zeros((1, 4))
    if draws:
        noise = fixed_noise(model.cfg.seed, draws, 4, torch.float64, "cpu").numpy()
    expected = np.stack(
        [np.mean([oracle.vae_loss(k, images.numpy(), e) for e in noise], axis=0) for k in range(EXPERTS)], axis=1
    )
    close(model.elbo_loss(images), expected)
    np.testing.assert_array_equal(model.route(images).numpy(), expected.argmin(1))


def test_conv_vae_resizes_for_itself_only():
    model = build(reference.LEViT, small_config(vae="conv"), 2)
    images = random_images(model.cfg, 3)
    larger = F.interpolate(images, (32, 32), mode="bilinear", align_corners=False).numpy()
    close(model.elbo_loss(images)[:, 1], Oracle(model).vae_loss(1, larger, np.zeros((3, 4))))
    assert model.features(images).shape == (3, 2, 9, 15)


def test_energy_rule_looks_at_reconstruction_errors():
    model = build(reference.LEViT, small_config(**VARIANTS["energy"]), EXPERTS)
    images, oracle = random_images(model.cfg, 5), Oracle(model)
    expected = [oracle.error(k, images.numpy(), oracle.encode(k, images.numpy())[0]) for k in range(EXPERTS - 1)]
    close(model.reconstruction_errors(images), np.stack(expected))


def test_log_sigma_is_clamped():
    model = build(reference.LEViT, small_config())
    with torch.no_grad():
        model.active.vae.log_sigma.bias.copy_(torch.tensor([-50.0, 50.0, 0.0, 0.1]))
    images = random_images(model.cfg, 3)
    sigma = Oracle(model).encode(0, images.numpy())[1]
    assert sigma.min() == np.exp(-8) and sigma.max() == np.exp(4)
    close(model.elbo_loss(images)[:, 0], Oracle(model).vae_loss(0, images.numpy(), 0))


def test_forward_routes_every_image_by_itself(model, images):
    expected = np.stack([Oracle(model).logits(k, images.numpy()) for k in range(EXPERTS)], axis=1)
    routes = model.route(images)
    close(model(images), expected[np.arange(len(images)), routes.numpy()])
    forced = torch.tensor([0, 1, 2, 2, 1, 0])
    model.route = lambda _: forced
    close(model(images), expected[np.arange(len(images)), forced.numpy()])


def test_equation_6_distances(model, images):
    oracle = Oracle(model)
    drawn = torch.randn(6, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64).numpy()
    mu, sigma = oracle.encode(2, images.numpy())
    query = mu + sigma * drawn
    noise = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    expected = []
    for j in range(2):
        mu, sigma = oracle.encode(j, images.numpy())
        expected.append(np.linalg.norm(mu + sigma * noise[j].numpy() - query, axis=1).mean())
    close(model.expansion_distances(images, torch.Generator().manual_seed(9), noise), expected)


def test_equation_6_noise_is_a_function_of_seed_expert_and_position():
    noise = position_noise(3, torch.arange(4), torch.arange(50), 6, torch.float64)
    again = position_noise(3, torch.tensor([2]), torch.tensor([41, 7]), 6, torch.float64)
    assert torch.equal(again[0], noise[2, [41, 7]])
    assert not torch.equal(position_noise(4, torch.arange(4), torch.arange(50), 6, torch.float64), noise)


def test_position_noise_is_standard_normal():
    noise = position_noise(0, torch.arange(5), torch.arange(4000), 20, torch.float64).flatten()
    quantiles = torch.quantile(noise, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64))
    expected = torch.tensor([-1.6449, -0.6745, 0, 0.6745, 1.6449], dtype=torch.float64)
    assert (quantiles - expected).abs().max() < 0.01
    assert abs(noise.mean()) < 0.006 and abs(noise.std() - 1) < 0.005


def test_training_loss(model, images):
    labels, oracle = random_labels(model.cfg, 6), Oracle(model)
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).numpy()
    logits = torch.from_numpy(oracle.logits(2, images.numpy(), batch_statistics=True))
    expected = F.cross_entropy(logits, labels).numpy() + oracle.vae_loss(2, images.numpy(), noise).mean()
    close(model.training_loss(images, labels, generator=torch.Generator().manual_seed(1)), expected)


def test_training_loss_reaches_the_active_expert_only(model, images):
    before = {key: value.clone() for key, value in model.experts[:-1].state_dict().items()}
    model.training_loss(images, random_labels(model.cfg, 6)).backward()
    assert all(p.grad is None for expert in model.experts[:-1] for p in expert.parameters())
    before_norm = {"embed.bias", "head.hidden.0.bias", "head.hidden.1.bias"}  # the batch mean takes them out again
    before_norm -= {name for name in before_norm if name not in dict(model.active.named_parameters())}
    for name, parameter in model.active.named_parameters():
        assert (parameter.grad is None) == (name in before_norm), name
        assert parameter.grad is None or parameter.grad.abs().max() > 0, name
    assert all(torch.equal(before[key], value) for key, value in model.experts[:-1].state_dict().items())


@vision_only
def test_training_loss_moves_running_statistics_of_the_active_expert(model, images):
    z = (
        np.array([Oracle(model).patches(image) for image in images.numpy()])
        @ model.active.embed.weight.detach().numpy().T
    )
    z = (z + model.active.embed.bias.detach().numpy()).reshape(-1, model.cfg.embed_dim)
    before = model.active.norm.running_mean.numpy().copy(), model.active.norm.running_var.numpy().copy()
    model.training_loss(images, random_labels(model.cfg, 6))
    close(model.active.norm.running_mean, 0.9 * before[0] + 0.1 * z.mean(0))
    close(model.active.norm.running_var, 0.9 * before[1] + 0.1 * z.var(0, ddof=1))
