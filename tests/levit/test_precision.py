"""precision="bf16": frozen experts in bfloat16, products of what learns rounded to it, and all close to float32."""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from helpers import VARIANTS, build, random_images, random_labels, small_config
from test_parity import learn

import levit
import levit_kernels
from levit.streams import Stream, load_dataset
from levit_kernels.backends import cpu

HAS_DOTS = (
    cpu.unavailable() is None
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
)
PACKED = {name: fields for name, fields in VARIANTS.items() if "dnn" not in name and name != "options"}


def pair(experts=3, dtype=torch.float32, **overrides):
    """The same weights in a model of either precision."""
    exact = build(levit.LEViT, small_config(**overrides), experts, dtype)
    half = levit.LEViT(small_config(**overrides, precision="bf16")).to(dtype)
    half.load_state_dict(exact.state_dict())
    return exact, half


def close(got, want, tolerance=0.02):
    assert got.dtype == want.dtype
    assert (got - want).norm() <= tolerance * want.norm(), float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", PACKED)
@torch.no_grad()
def test_outputs_are_close_and_routes_the_same(variant, dtype):
    exact, half = pair(dtype=dtype, **PACKED[variant])
    images = random_images(exact.cfg, 40, dtype)
    same = half.route(images) == exact.route(images)  # random experts hardly differ; trained ones have a test below
    assert same.float().mean() > 0.9
    close(half(images)[same], exact(images)[same])
    close(half.features(images), exact.features(images))
    for k in range(3):
        close(half.forward_expert(images, k), exact.forward_expert(images, k))
    labels, noise = random_labels(exact.cfg, 40), torch.randn(40, exact.cfg.latent_dim, dtype=dtype)
    loss = exact.training_loss(images, labels, noise=noise)
    got = half.training_loss(images, labels, noise=noise)
    close(got, loss, 1e-3)
    assert got != loss or len(half.gates(2)) == 0  # the frozen experts have a part in it


@torch.no_grad()
def test_the_active_expert_predicts_in_float32():
    exact, half = pair()
    images = random_images(exact.cfg, 9, torch.float32)
    assert torch.equal(half.features(images)[:, -1], exact.features(images)[:, -1])
    assert not torch.equal(half.features(images)[:, 0], exact.features(images)[:, 0])
    assert torch.equal(half.elbo_loss(images)[:, -1], exact.elbo_loss(images)[:, -1])
    for k in range(3):
        one = half.expert_elbo_loss(images, k)
        torch.testing.assert_close(one, half.elbo_loss(images)[:, k], rtol=1e-6, atol=0)
        torch.testing.assert_close(one, exact.elbo_loss(images)[:, k], rtol=0.01, atol=0)
    assert half.knowledge.attention(half.frozen).w_qkv.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in half.state_dict().values() if x.is_floating_point())


@pytest.mark.parametrize("routing", ["vae", "fused"])
def test_routes_of_trained_experts_agree(routing):
    cfg = levit.LEViTConfig.preset("digits", routing=routing, prior=None)
    stream = Stream.from_config(cfg, load_dataset("digits"))
    learner = levit.Learner(levit.LEViT(cfg))
    for images, labels in stream:
        learner.observe(images, labels)
    exact = learner.model
    half = levit.LEViT(dataclasses.replace(cfg, precision="bf16"))
    half.load_state_dict(exact.state_dict())
    with torch.no_grad():
        images = stream.test.images[:]
        assert exact.num_experts >= 3
        assert (half.route(images) == exact.route(images)).float().mean() >= 0.995
        assert (half(images).argmax(1) == exact(images).argmax(1)).float().mean() >= 0.99


def test_states_load_both_ways():
    exact, half = pair()
    assert list(half.state_dict()) == list(exact.state_dict())
    again = levit.LEViT(exact.cfg)
    again.load_state_dict(half.state_dict())
    images = random_images(exact.cfg, 5, torch.float32)
    with torch.no_grad():
        assert torch.equal(again(images), exact(images))


def test_the_reference_ignores_it_and_accelerate_heeds_it():
    exact, half = pair()
    images = random_images(exact.cfg, 5, torch.float32)
    reference = levit.reference.LEViT(half.cfg)
    reference.load_state_dict(half.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(reference(images), exact(images), rtol=1e-4, atol=1e-5)
        assert torch.equal(levit_kernels.accelerate(reference)(images), half(images))


@pytest.mark.skipif(not HAS_DOTS, reason="this CPU has no dot product of bfloat16 pairs")
@pytest.mark.parametrize("variant", PACKED)
def test_what_learns_rounds_products_only(variant):
    exact, half = pair(experts=1, **PACKED[variant])
    images, labels = random_images(exact.cfg, 40, torch.float32), random_labels(exact.cfg, 40)
    noise, found = torch.randn(40, exact.cfg.latent_dim), []
    for model in (exact, half):
        losses = model._classification_loss(images, labels, None), model._vae_training_loss(images, None, noise)
        sum(losses).backward()
        with torch.no_grad():
            found.append([*losses, model._active_codes(images, torch.Generator().manual_seed(0))])
    for one, other in zip(*found, strict=True):
        close(one, other)
        assert not torch.equal(one, other)
    for one, other in zip(half.active.parameters(), exact.active.parameters(), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
        if other.grad is not None:
            assert (one.grad - other.grad).norm() <= 0.3 * (other.grad.norm() + 0.1)


@pytest.mark.parametrize("cache", ["auto", 0, "off"])
def test_learning_is_close_to_float32(cache):
    cfg = small_config(gamma=2.3, cache=cache)
    half_cfg = small_config(gamma=2.3, cache=cache, precision="bf16")
    with pytest.warns(UserWarning, match="over the budget") if cache == 0 else nullcontext():
        exact, half = (learn(levit.LEViT, c, 15, torch.float32) for c in (cfg, half_cfg))
    assert exact[0].model.num_experts == half[0].model.num_experts > 2
    if cache == "auto":
        assert half[0].cache.features.dtype == torch.bfloat16
    losses = [torch.tensor([e.loss for e in run[1] if e.loss is not None]) for run in (exact, half)]
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)


def test_the_cache_keeps_what_the_model_computes():
    learner, _ = learn(levit.LEViT, small_config(gamma=2.3, precision="bf16"), 13, torch.float32)
    live = learner.memory.live()
    with torch.no_grad():
        found = learner.model.frozen_features(learner.memory.images[live])
    assert torch.equal(learner.cache.features[live], found)


def test_resuming_equals_not_stopping():
    cfg = small_config(gamma=2.3, precision="bf16")
    learner, _ = learn(levit.LEViT, cfg, 13, torch.float32)
    other = levit.Learner(levit.LEViT(cfg))
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    for i in range(13, 18):
        images, labels = random_images(cfg, 4, torch.float32, seed=i), random_labels(cfg, 4, seed=i)
        assert learner.observe(images, labels).loss == other.observe(images, labels).loss
    for one, two in zip(learner.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_save_and_load(tmp_path):
    _, half = pair()
    half.save(tmp_path / "model.pt")
    loaded = levit.LEViT.load(tmp_path / "model.pt")
    images = random_images(half.cfg, 5, torch.float32)
    assert loaded.cfg.precision == "bf16"
    with torch.no_grad():
        assert torch.equal(loaded(images), half(images))


def test_frozen_parameters_never_move():
    learner, _ = learn(levit.LEViT, small_config(gamma=2.3, precision="bf16"), 13, torch.float32)
    before = [x.clone() for expert in learner.model.frozen for x in expert.state_dict().values()]
    cfg = learner.cfg
    learner.observe(random_images(cfg, 4, torch.float32), random_labels(cfg, 4))
    after = [x for expert in learner.model.frozen for x in expert.state_dict().values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=False))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"precision": "fp16"}, "precision: expected one of fp32, bf16, got 'fp16'"),
        ({"precision": "bf16", "expert": "dnn"}, "precision: expected 'fp32', for expert 'dnn'"),
        ({"precision": "bf16", "pos_embed": True}, "precision: expected 'fp32', for expert 'dnn' and with pos_embed"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(**fields)
