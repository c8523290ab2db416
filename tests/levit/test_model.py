"""levit.LEViT against levit.reference.LEViT: same numbers, same state, same interface."""

import copy

import pytest
import torch
from helpers import VARIANTS, build, random_images, random_labels, small_config

import levit
import levit_kernels

VARIANTS = VARIANTS | {"sampled-routing": {"route_samples": 3}}


def pair(cfg, experts, dtype=torch.float64):
    """A reference and a fused model with the same parameters."""
    reference = build(levit.reference.LEViT, cfg, experts, dtype)
    fused = levit.LEViT(cfg).to(dtype)
    fused.load_state_dict(reference.state_dict())
    return reference, fused


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request):
    return small_config(**VARIANTS[request.param])


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_evaluation_agrees(variant, experts):
    reference, fused = pair(variant, experts)
    images = random_images(variant, 9)
    with torch.no_grad():
        close(fused.features(images), reference.features(images))
        close(fused.elbo_loss(images), reference.elbo_loss(images))
        assert torch.equal(fused.route(images), reference.route(images))
        close(fused(images), reference(images))
        for k in range(experts):
            close(fused.forward_expert(images, k), reference.forward_expert(images, k))
        generators = (torch.Generator().manual_seed(1) for _ in range(2))
        distances = [m.expansion_distances(images, g) for m, g in zip((fused, reference), generators, strict=True)]
        close(*distances)
        assert distances[0].shape == (experts - 1,)


def test_evaluation_agrees_with_a_conv_vae():
    reference, fused = pair(small_config(vae="conv", route_samples=2), 2, torch.float32)
    images = random_images(fused.cfg, 3, torch.float32)
    with torch.no_grad():
        close(fused.elbo_loss(images), reference.elbo_loss(images), 1e-5)
        close(fused(images), reference(images), 1e-4)
        generators = (torch.Generator().manual_seed(1) for _ in range(2))
        close(*(m.expansion_distances(images, g) for m, g in zip((fused, reference), generators, strict=True)), 1e-5)


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_forced_routes_agree(variant, experts):
    reference, fused = pair(variant, experts)
    images = random_images(variant, 3 * experts)
    routes = torch.arange(experts).repeat(3)
    reference.route = fused.route = lambda _: routes
    with torch.no_grad():
        close(fused(images), reference(images))
        reference.route = fused.route = lambda _: torch.zeros_like(routes)
        close(fused(images), reference(images))


@pytest.mark.parametrize("experts", [1, 3])
def test_training_loss_and_gradients_agree(variant, experts):
    reference, fused = pair(variant, experts)
    images, labels = random_images(variant, 6), random_labels(variant, 6)
    losses = []
    for model in (reference, fused):
        loss = model.training_loss(images, labels, generator=torch.Generator().manual_seed(2))
        loss.backward()
        losses.append(loss.detach())
    close(losses[1], losses[0])
    for (name, expected), actual in zip(reference.active.named_parameters(), fused.active.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-9, atol=1e-10, msg=name)
    assert all(parameter.grad is None for expert in fused.experts[:-1] for parameter in expert.parameters())
    for (name, expected), actual in zip(reference.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("experts", [1, 3])
def test_set_gradients_leaves_those_of_the_training_loss(variant, experts):
    reference, fused = pair(variant, experts)
    images, labels = random_images(variant, 6), random_labels(variant, 6)
    for parameter in fused.active.parameters():
        parameter.grad = torch.ones_like(parameter)  # of a step before
    losses = [m.set_gradients(images, labels, generator=torch.Generator().manual_seed(2)) for m in (reference, fused)]
    close(losses[1], losses[0])
    assert not losses[0].requires_grad and not losses[1].requires_grad
    for (name, expected), actual in zip(reference.active.named_parameters(), fused.active.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-9, atol=1e-10, msg=name)
    assert all(parameter.grad is None for expert in fused.experts[:-1] for parameter in expert.parameters())
    for (name, expected), actual in zip(reference.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


class Regularised(levit.LEViT):
    """A researcher's own loss."""

    def training_loss(self, *args, **kwargs):
        return super().training_loss(*args, **kwargs) + self.active.head.out.bias.square().sum()


@pytest.mark.parametrize("meddle", ["hook", "late hook", "frozen parameter", "other loss", "subclass", "autocast"])
def test_set_gradients_heeds_what_autograd_would(meddle):
    """What is done to the fused model by its user has the effect that it would have on `training_loss().backward()`."""
    gradients = []
    for whole in (False, True):
        model = build(Regularised if meddle == "subclass" else levit.LEViT, small_config(), 3, torch.float32)
        bias, own_loss = model.active.head.out.bias, model.training_loss
        if meddle == "hook":
            bias.register_hook(lambda gradient: 7 * gradient)
        elif meddle == "late hook":
            bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", 7 * parameter.grad))
        elif meddle == "frozen parameter":
            bias.requires_grad_(False)
        elif meddle == "other loss":
            model.training_loss = lambda *args, own_loss=own_loss, **kwargs: 7 * own_loss(*args, **kwargs)
        images, labels = random_images(model.cfg, 6, torch.float32), random_labels(model.cfg, 6)
        noise = torch.randn(6, model.cfg.latent_dim, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", torch.bfloat16, enabled=meddle == "autocast"):
            if whole:
                model.set_gradients(images, labels, noise=noise)
            else:
                model.training_loss(images, labels, noise=noise).backward()
        gradients.append([parameter.grad for parameter in model.active.parameters()])
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert (actual is None) == (expected is None)
        assert expected is None or torch.equal(actual, expected)


@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
def test_set_gradients_wants_them_enabled(kind):
    model = build(kind, small_config(), 2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        model.set_gradients(random_images(model.cfg, 6), random_labels(model.cfg, 6))


def test_gradients_of_evaluation_agree():
    """Evaluating with gradients on is differentiable, as the reference is: to images and the active expert."""
    reference, fused = pair(small_config(), 3)
    gradients = []
    for model in (reference, fused):
        images = random_images(model.cfg, 9).requires_grad_()
        model.route = lambda _: torch.arange(3).repeat(3)
        (model(images).square().sum() + model.elbo_loss(images).sum()).backward()
        gradients.append([images.grad, *(p.grad for p in model.active.parameters())])
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        close(actual, expected, 1e-9)


@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
def test_predictions_do_not_depend_on_batch_or_order(kind):
    model = build(kind, small_config(), 3).train()
    levels = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    for expert, level in zip(model.experts, levels, strict=True):  # each knows one brightness
        with torch.no_grad():
            expert.vae.decoder[2].weight.mul_(0.1)
            expert.vae.decoder[2].bias.fill_(level)
    images = 0.2 * random_images(model.cfg, 12) + levels.repeat(4)[:, None, None, None]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        logits, routes = model(images), model.route(images)
        assert torch.equal(routes, torch.arange(3).repeat(4))
        close(model(images[order]), logits[order], 1e-12)
        close(torch.cat([model(image[None]) for image in images]), logits, 1e-12)
        close(torch.cat([model(part) for part in images.split(5)]), logits, 1e-12)
        assert torch.equal(torch.cat([model.route(image[None]) for image in images]), routes)
        close(model.eval()(images), logits, 0)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_more_images_than_a_chunk(monkeypatch):
    reference, fused = pair(small_config(), 3)
    images = random_images(fused.cfg, 11)
    monkeypatch.setattr("levit.model.CHUNK", 4)
    with torch.no_grad():
        close(fused(images), reference(images))
        close(fused.elbo_loss(images), reference.elbo_loss(images))


@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
@pytest.mark.parametrize("experts", [1, 3])
def test_empty_batches(kind, experts):
    model = build(kind, small_config(), experts)
    images = random_images(model.cfg, 0)
    with torch.no_grad():
        assert model(images).shape == (0, 5) and model.route(images).shape == (0,)
        assert model.elbo_loss(images).shape == (0, experts) and model.features(images).shape == (0, experts, 9, 15)
        assert model.forward_expert(images, experts - 1).shape == (0, 5)


def test_uint8_and_strided_images():
    reference, fused = pair(small_config(), 3)
    raw = (random_images(fused.cfg, 6) * 255).to(torch.uint8)
    with torch.no_grad():
        close(fused(raw), reference(raw.double() / 255))
        strided = (raw.double() / 255).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        close(fused(strided), reference(raw))


@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
def test_bad_input_names_itself(kind):
    model = build(kind, small_config(), 2)
    images, labels = random_images(model.cfg, 4), random_labels(model.cfg, 4)
    for call in (model, model.features, model.route, model.elbo_loss, model.expansion_distances):
        with pytest.raises(ValueError, match=r"images: expected \[B, 3, 6, 6\], got \[4, 3, 6, 5\]"):
            call(images[..., :5])
        with pytest.raises(TypeError, match="images: expected torch.float64 or torch.uint8, got torch.float32"):
            call(images.float())
    with pytest.raises(ValueError, match="k: expected an expert from 0 to 1, got 2"):
        model.forward_expert(images, 2)
    with pytest.raises(ValueError, match="k: expected an expert from 0 to 1, got -1"):
        model.forward_expert(images, -1)
    with pytest.raises(ValueError, match="images: expected at least 2"):
        model.training_loss(images[:1], labels[:1])
    with pytest.raises(TypeError, match="labels: expected torch.int64, got torch.int32"):
        model.training_loss(images, labels.int())


@pytest.mark.parametrize("saved", [1, 2, 6])
@pytest.mark.parametrize("present", [1, 4])
def test_state_dicts_interchange_across_models_and_numbers_of_experts(saved, present):
    source = build(levit.reference.LEViT, small_config(), saved)
    target = build(levit.LEViT, small_config(seed=9), present)
    images = random_images(source.cfg, 7)
    with torch.no_grad():
        target(images)  # packs what is about to be replaced
        target.load_state_dict(source.state_dict())
        assert target.num_experts == saved
        close(target(images), source(images))
    assert [p.requires_grad for p in target.parameters()] == [p.requires_grad for p in source.parameters()]
    back = build(levit.reference.LEViT, small_config(), present)
    back.load_state_dict(target.state_dict())
    assert list(back.state_dict()) == list(source.state_dict()) == list(target.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), source.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
def test_a_state_of_another_model_changes_nothing(kind):
    model = build(kind, small_config(), 2)
    before = copy.deepcopy(model.state_dict())
    other = build(kind, small_config(embed_dim=8), 3).state_dict()
    with pytest.raises(ValueError, match=r"experts.0.embed.weight: expected \[7, 12\], got \[8, 12\]"):
        model.load_state_dict(other)
    with pytest.raises(ValueError, match="expected keys of experts 0, 1"):
        model.load_state_dict({key.replace("experts.0", "experts.4"): value for key, value in before.items()})
    assert model.num_experts == 2 and all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_accelerate_keeps_every_parameter():
    reference = build(levit.reference.LEViT, small_config(), 3)
    parameters, images = list(reference.parameters()), random_images(reference.cfg, 6)
    with torch.no_grad():
        expected = reference(images)
        fused = levit_kernels.accelerate(reference)
        assert fused is reference and type(fused) is levit.LEViT
        assert all(a is b for a, b in zip(fused.parameters(), parameters, strict=True))
        close(fused(images), expected)
        assert levit_kernels.accelerate(fused) is fused
    fused.add_expert()
    assert fused.num_experts == 4


def test_accelerate_refuses_what_it_does_not_know():
    class Own(levit.reference.LEViT):
        pass

    with pytest.raises(TypeError, match="expected levit.reference.LEViT itself, got Own"):
        levit_kernels.accelerate(Own(small_config()))
    with pytest.raises(TypeError, match="Linear"):
        levit_kernels.accelerate(torch.nn.Linear(2, 2))


def edit_in_place(model):
    with torch.no_grad():
        model.experts[1].norm.running_mean.add_(0.5)
        model.experts[0].qkv.weight.mul_(0.9)
        model.experts[1].vae.decoder[2].bias.sub_(0.1)


@pytest.mark.parametrize(
    "change",
    [edit_in_place, lambda model: model.float(), lambda model: model.float().double()],
    ids=["edit", "to", "there and back"],
)
def test_packed_weights_follow_their_source(change):
    reference, fused = pair(small_config(), 4)
    images = random_images(fused.cfg, 6)
    with torch.no_grad():
        fused(images)
        change(reference)
        change(fused)
        images = images.to(fused.active.embed.weight.dtype)
        tolerance = 1e-10 if images.dtype == torch.float64 else 1e-4
        close(fused(images), reference(images), tolerance)
        close(fused.elbo_loss(images), reference.elbo_loss(images), tolerance)


def test_knowledge_base_grows_by_doubling():
    model = build(levit.LEViT, small_config(), 1)
    addresses = set()
    with torch.no_grad():
        for _ in range(40):
            model.add_expert()
            model.features(random_images(model.cfg, 1))
            addresses.add(
                (len(model.knowledge._attention.storage[0]), model.knowledge._attention.storage[0].data_ptr())
            )
    assert sorted(capacity for capacity, _ in addresses) == [4, 8, 16, 32, 64]


def test_deepcopy_is_independent():
    _, fused = pair(small_config(), 3)
    images = random_images(fused.cfg, 6)
    with torch.no_grad():
        expected = fused(images)
        clone = copy.deepcopy(fused)
        edit_in_place(clone)
        assert not torch.allclose(clone(images), expected)
        close(fused(images), expected, 0)
