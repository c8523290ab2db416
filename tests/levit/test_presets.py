"""The presets and variants of SPEC.md: their numbers, and that fused and reference model agree at their sizes."""

import pytest
import torch

import levit
from levit.arguments import parse_train
from levit.config import PRESETS, VARIANTS, LEViTConfig

TABLE = {
    # SPEC.md: image, patch, Q, H, head, VAE, L, memory, γ, classes, per experience
    "digits": (8, 2, 32, 2, (64,), "mlp", 16, 200, None, 10, 2),
    "split-mnist": (28, 7, 100, 3, (100,), "mlp", 50, 2000, 9.4, 10, 2),
    "split-fashion": (28, 7, 100, 3, (100,), "mlp", 50, 2000, 9.4, 10, 2),
    "permuted-mnist": (28, 7, 100, 3, (100,), "mlp", 50, 2000, None, 10, 2),
    "split-mnist-fashion": (28, 7, 100, 3, (100,), "mlp", 50, 2000, None, 20, 2),
    "split-cifar10": (32, 8, 100, 3, (500, 200), "conv", 200, 1000, 19.95, 10, 2),
    "split-cifar100": (32, 8, 100, 3, (500, 200), "conv", 200, 5000, 19.95, 100, 5),
    "split-mnist-svhn": (32, 8, 100, 3, (500, 200), "conv", 200, 1000, None, 20, 2),
    "split-miniimagenet": (84, 12, 100, 3, (500, 200), "conv", 200, 10000, None, 100, 5),
}


def test_every_preset_of_the_table_and_no_other():
    assert set(PRESETS) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_numbers(name):
    cfg = LEViTConfig.preset(name)
    fields = "image_size patch_size embed_dim num_heads head_hidden vae latent_dim memory_size gamma num_classes"
    assert tuple(getattr(cfg, field) for field in [*fields.split(), "classes_per_task"]) == TABLE[name]
    assert cfg.batch_size == 10 and cfg.channels == (3 if cfg.vae == "conv" else 1)
    assert cfg.route_samples == (10 if cfg.vae == "conv" else 0)
    assert cfg.scenario == {"permuted-mnist": "permuted"}.get(name, "joined" if "+" in cfg.dataset else "split")
    assert cfg.routing == ("vae" if name == "permuted-mnist" else "fused") and cfg.calibration
    assert cfg.permutations == 10 and LEViTConfig(**cfg.to_dict()) == cfg


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("levit-dkf", dict(gating="learned", expert="vit")),
        ("levit-no-dkf", dict(gating="none", expert="vit")),
        ("levit-dkf-fixed", dict(gating="fixed", expert="vit")),
        ("levit-dnn", dict(gating="learned", expert="dnn")),
    ],
)
def test_variants(variant, fields):
    cfg = LEViTConfig.preset("split-mnist", variant=variant, seed=3)
    assert {name: getattr(cfg, name) for name in fields} == fields and cfg.seed == 3
    assert cfg.gamma == 9.4 and set(VARIANTS) == {"levit-dkf", "levit-no-dkf", "levit-dkf-fixed", "levit-dnn"}


def test_fields_come_before_the_variant():
    assert LEViTConfig.preset("digits", variant="levit-no-dkf", gating="fixed").gating == "fixed"
    with pytest.raises(ValueError, match="variant: expected one of levit-dkf.* got 'dnn'. Did you mean 'levit-dnn'"):
        LEViTConfig.preset("digits", variant="dnn")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("scenario", "split-up", "one of split, permuted, joined, shuffled, drifting"),
        ("drift", -0.1, "0 or more"),
        ("permutations", 0, "a whole number of at least 1"),
        ("class_order", "random", "natural, shuffled or the classes in their order"),
        ("class_order", ("a", "b"), "natural, shuffled or the classes in their order"),
    ],
)
def test_stream_fields_that_make_no_sense(field, value, said):
    with pytest.raises(ValueError, match=f"{field}: expected {said}, got"):
        LEViTConfig.preset("digits", **{field: value})


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("split-fashion", "split-cifar100")])
def test_fused_and_reference_model_agree(name):
    """At the published sizes, with two experts; what a preset adds to another in numbers of classes is left out."""
    cfg = LEViTConfig.preset(name, route_samples=min(1, LEViTConfig.preset(name).route_samples))
    reference = levit.reference.LEViT(cfg)
    fused = levit.LEViT(cfg)
    images = torch.rand(3, cfg.channels, cfg.image_size, cfg.image_size)
    for model in (reference, fused):
        model.add_expert()
    with torch.no_grad():
        torch.testing.assert_close(fused(images), reference(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused.elbo_loss(images), reference.elbo_loss(images), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", TABLE)
def test_a_prior_where_routing_keeps_a_shared_space(name):
    usual, published = parse_train(name, []).config, parse_train(name, ["--routing", "vae"]).config
    assert usual == LEViTConfig.preset(name) and usual.prior == ("none" if name == "permuted-mnist" else "shared")
    assert published == LEViTConfig.preset(name, routing="vae") and published.prior == "none"
    assert parse_train(name, ["--routing", "fused", "--prior", "none"]).config.prior == "none"
