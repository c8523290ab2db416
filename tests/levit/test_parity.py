"""Whole runs: the fused learner does what the reference learner does, with and without the knowledge cache."""

import warnings
from unittest.mock import patch

import pytest
import torch
from helpers import VARIANTS, build, random_images, random_labels, small_config

import levit

VARIANTS = VARIANTS | {"sampled-routing": {"route_samples": 3}}


def learn(kind, cfg, batches, dtype=torch.float64):
    """The learner after `batches` random batches, and what each of them did."""
    learner = levit.Learner(kind(cfg).to(dtype))
    events = []
    for i in range(batches):
        images = random_images(cfg, cfg.batch_size, dtype, seed=i)
        events.append(learner.observe(images, random_labels(cfg, cfg.batch_size, seed=i)))
    return learner, events


def compare(a, b, tolerance):
    (first, first_events), (second, second_events) = a, b
    assert [event.expanded for event in first_events] == [event.expanded for event in second_events]
    for one, other in zip(first_events, second_events, strict=True):
        assert (one.loss is None) == (other.loss is None) and (one.distances is None) == (other.distances is None)
        if one.loss is not None:
            assert abs(one.loss - other.loss) <= tolerance * max(1, abs(one.loss))
        if one.distances is not None:
            torch.testing.assert_close(one.distances, other.distances, rtol=tolerance, atol=tolerance)
    for (key, one), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )
    images = random_images(first.cfg, 8, one.dtype, seed=999)
    with torch.no_grad():
        torch.testing.assert_close(first.model(images), second.model(images), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_through_two_expansions_and_fifty_steps(variant):
    """The rule fires by itself, on the same batch in both."""
    cfg = small_config(gamma=2.3, **VARIANTS[variant])
    reference = learn(levit.reference.LEViT, cfg, 34)
    fused = learn(levit.LEViT, cfg, 34)
    assert reference[0].model.num_experts >= 3
    assert sum(event.loss is not None for event in reference[1]) * cfg.updates_per_batch >= 50
    compare(reference, fused, 1e-9)


@pytest.mark.parametrize("criterion", ["latent", "energy"])
def test_a_conv_vae_through_an_expansion(criterion):
    cfg = small_config(
        vae="conv", criterion=criterion, energy_threshold=1e9, gamma=1e9, memory_size=8, updates_per_batch=1
    )
    reference, fused = (learn(kind, cfg, 4) for kind in (levit.reference.LEViT, levit.LEViT))
    assert reference[0].model.num_experts == 2 and reference[1][-1].distances is not None
    compare(reference, fused, 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_over_one_step(variant):
    """One update: loss, gradients and what they do to the logits are as near to float64 as the reference's are."""
    cfg = small_config(gamma=1e9, **VARIANTS[variant])
    exact = build(levit.reference.LEViT, cfg, 3)
    outcomes = {}
    for name, kind, dtype in (
        ("exact", levit.reference.LEViT, torch.float64),
        ("reference", levit.reference.LEViT, torch.float32),
        ("fused", levit.LEViT, torch.float32),
    ):
        model = kind(cfg).to(dtype)
        model.load_state_dict(exact.state_dict())
        images, labels = random_images(cfg, 8).float(), random_labels(cfg, 8)
        noise = torch.randn(8, cfg.latent_dim, generator=torch.Generator().manual_seed(4))
        with patch("levit.reference.normal", lambda *_, noise=noise, dtype=dtype: noise.to(dtype)):
            loss = model.training_loss(images.to(dtype), labels)
        loss.backward()
        torch.optim.SGD(model.active.parameters(), lr=1e-2).step()
        with torch.no_grad():
            logits = model(images.to(dtype))
        gradients = {key: p.grad for key, p in model.active.named_parameters() if p.grad is not None}
        outcomes[name] = {"loss": loss.detach(), "logits": logits, **gradients}
    for key, expected in outcomes["exact"].items():
        scale = expected.norm() + 1e-3
        of_reference, of_fused = (float((outcomes[m][key] - expected).norm() / scale) for m in ("reference", "fused"))
        assert of_fused <= 2 * of_reference + 1e-6, key


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", ["off", 1000])
def test_without_the_cache_the_numbers_are_the_same(variant, cache):
    cfg = small_config(gamma=2.3, **VARIANTS[variant])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = learn(levit.LEViT, levit.LEViTConfig(**(cfg.to_dict() | {"cache": cache})), 15)
    compare(learn(levit.LEViT, cfg, 15), without, 1e-9)


def test_a_cache_over_budget_says_so_once():
    cfg = small_config(gamma=1e-9, cache=1000)
    with pytest.warns(
        UserWarning, match="cache: features of 1 frozen experts for 20 images take .* MiB, over the budget"
    ) as told:
        learner, _ = learn(levit.LEViT, cfg, 20)
    assert learner.model.num_experts == 5 and len([w for w in told if "budget" in str(w.message)]) == 1
    assert learner.cache.features is None


def test_the_cache_holds_what_the_frozen_experts_say():
    cfg = small_config(gamma=1e-9)
    learner, _ = learn(levit.LEViT, cfg, 13)
    memory, model = learner.memory, learner.model
    assert model.num_experts == 3 and 0 < len(memory) < memory.capacity
    live = memory.live()
    with torch.no_grad():
        expected = levit.reference.LEViT.features(model, memory.images[live])[:, :2]
        torch.testing.assert_close(learner.cache.features[live], expected, rtol=1e-10, atol=1e-10)
        noise = model.frozen_noise(memory.positions[live])
        for j in range(2):
            mu, log_sigma = model.experts[j].vae.encode(memory.images[live])
            codes = mu + log_sigma.exp() * noise[j]
            torch.testing.assert_close(learner.cache.codes[j][live], codes, rtol=1e-10, atol=1e-10)


def test_a_bf16_cache_is_close():
    cfg = small_config(gamma=2.3)
    exact, half = (
        learn(levit.LEViT, levit.LEViTConfig(**(cfg.to_dict() | {"cache_dtype": dtype})), 15, torch.float32)
        for dtype in ("fp32", "bf16")
    )
    assert half[0].cache.features.dtype == torch.bfloat16
    losses = [[event.loss for event in run[1] if event.loss is not None] for run in (exact, half)]
    assert losses[0] != losses[1]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=5e-3, atol=0)
