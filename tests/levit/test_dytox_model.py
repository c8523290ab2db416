"""DyTox against its equations in NumPy, growth, checkpoints of the public implementation, and bad input."""

import copy
import sys

import numpy as np
import pytest
import torch
from dytox_helpers import Oracle, build, random_images, small

import levit
from levit.dytox.blocks import GPSA


@pytest.mark.parametrize("attention", ["gpsa", "mhsa"])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "separate"])
def test_outputs_are_the_equations(attention, joint):
    model = build((3, 2, 1), small(attention=attention, joint=joint))
    oracle, images = Oracle(model), random_images(3)
    logits, divergence = model.training_outputs(images)
    for i, image in enumerate(images.numpy()):
        np.testing.assert_allclose(logits[i].detach().numpy(), oracle.logits(image), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(divergence[i].detach().numpy(), oracle.divergence(image), rtol=1e-10, atol=1e-12)
    assert torch.equal(model(images), logits)
    np.testing.assert_allclose(model.probabilities(images).detach(), 1 / (1 + np.exp(-logits.detach().numpy())))
    assert model.route(images).tolist() == [[0, 0, 0, 1, 1, 2][c] for c in logits.argmax(1).tolist()]


def test_gpsa_is_the_equation():
    torch.manual_seed(0)
    layer = GPSA(12, 4, 4).double()
    oracle = Oracle.__new__(Oracle)
    oracle.cfg, oracle.state = small(), {f"a.{k}": v.numpy() for k, v in layer.state_dict().items()}
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    for got, image in zip(layer(x).detach().numpy(), x.numpy(), strict=True):
        np.testing.assert_allclose(got, oracle.gpsa("a", image), rtol=1e-10, atol=1e-12)


def test_new_gpsa_heads_look_at_their_own_neighbour():
    """With 4 heads the neighbours are those of a 2 x 2 window; the sharper, the more of the attention they get."""
    layer = GPSA(8, 4, 6)
    layer.start_locally(10.0)
    assert torch.equal(layer.v.weight, torch.eye(8))
    position = torch.softmax(layer.pos_proj(layer.offsets).permute(2, 0, 1), -1)
    middle = 2 * 6 + 2
    best = [position[h, middle].topk(4).indices.tolist() for h in range(4)]
    shifts = [sorted((j // 6 - 2, j % 6 - 2) for j in row) for row in best]
    assert shifts == [
        [(i + di, j + dj) for di in (0, 1) for dj in (0, 1)] for j, i in ((-1, -1), (-1, 0), (0, -1), (0, 0))
    ]


def test_joint_and_separate_give_the_same_gradients():
    images, weights = random_images(4), torch.randn(4, 6, dtype=torch.float64)
    grads = []
    for joint in (True, False):
        model = build((3, 2, 1), small(joint=joint))
        loss = (model(images) * weights).sum()
        grads.append(torch.autograd.grad(loss, [p for n, p in model.named_parameters() if "head_div" not in n]))
    for x, y in zip(*grads, strict=True):
        assert (x - y).norm() <= 1e-10 * y.norm() + 1e-14


def test_the_cifar_preset_has_10_7_million_parameters():
    model = levit.DyTox(levit.DyToxConfig.preset("dytox-cifar100"))
    model.add_task(10)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(10.7e6, rel=0.002)


class TestGrowth:
    def test_a_task_is_a_token_and_a_classifier(self):
        model = levit.DyTox(small())
        assert model.num_tasks == 0 and model.classes_per_task == []
        model.add_task(3)
        assert model.head_div is None
        model.add_task(2)
        assert model.num_tasks == model.num_experts == 2 and model.classes_per_task == [3, 2]
        assert model.head_div.head.out_features == 3
        model.add_task(4)
        assert model.head_div.head.out_features == 5 and model(random_images(2, torch.float32)).shape == (2, 9)

    def test_a_new_task_leaves_what_was_said_of_the_old_classes(self):
        model, images = build((3,)), random_images(3)
        before = model(images)
        model.add_task(2)
        torch.testing.assert_close(model(images)[:, :3], before, rtol=1e-12, atol=1e-12)

    def test_weights_depend_on_the_seed_alone(self):
        models = []
        for noise, seed in ((1, 3), (2, 3), (2, 4)):
            torch.manual_seed(noise)
            model = levit.DyTox(small(seed=seed))
            model.add_task(2)
            models.append(model.state_dict())
        first, same, other = models
        assert all(torch.equal(first[key], same[key]) for key in first)
        assert not torch.equal(first["task_tokens.0"], other["task_tokens.0"])
        assert not torch.equal(first["head.0.head.weight"], other["head.0.head.weight"])

    def test_no_divergence_head_without_its_loss(self):
        assert build((2, 2), small(divergence=0.0)).head_div is None

    @pytest.mark.parametrize("count", [0, -1, 2.0, True, None])
    def test_a_task_has_classes(self, count):
        model = build((3,))
        with pytest.raises(ValueError, match="num_classes: expected a whole number of at least 1, got"):
            model.add_task(count)
        assert model.num_tasks == 1

    def test_a_model_without_a_task_says_so(self):
        with pytest.raises(RuntimeError, match="no task yet"):
            levit.DyTox(small())(random_images(1, torch.float32))


class TestCheckpoints:
    def test_key_names_are_those_of_the_public_implementation(self):
        block = "norm1 attn.{} norm2 mlp.fc1 mlp.fc2"
        layers = {
            "patch_embed.proj": True,
            **{f"sabs.{i}.{n}": True for i in (0, 1) for n in block.replace("attn.{} ", "").split()},
            **{f"sabs.{i}.attn.{n}": n not in ("qk", "v") for i in (0, 1) for n in ("qk", "v", "proj", "pos_proj")},
            **{f"tabs.0.{n}": True for n in block.replace("attn.{} ", "").split()},
            **{f"tabs.0.attn.{n}": n == "proj" for n in ("q", "k", "v", "proj")},
            **{f"{h}.{n}": True for h in ("head.0", "head.1", "head_div") for n in ("norm", "head")},
        }
        keys = {f"{name}.weight" for name in layers} | {f"{name}.bias" for name, bias in layers.items() if bias}
        keys |= {"pos_embed", "task_tokens.0", "task_tokens.1", *(f"sabs.{i}.attn.gating_param" for i in (0, 1))}
        state = build((3, 2)).state_dict()
        assert set(state) == keys and state["task_tokens.0"].shape == (1, 1, 12)

    def test_a_public_checkpoint_loads_with_its_sizes(self):
        source = build((3, 2), dtype=torch.float32)
        model = levit.DyTox.from_official(source.state_dict(), seed=9)
        cfg = model.cfg
        assert (cfg.image_size, cfg.patch_size, cfg.embed_dim, cfg.num_heads, cfg.depth) == (8, 2, 12, 4, 2)
        assert cfg.mlp_ratio == 2 and cfg.seed == 9 and model.classes_per_task == [3, 2]
        model.mean.copy_(source.mean)
        model.std.copy_(source.std)
        images = random_images(2, torch.float32)
        assert torch.equal(model(images), source(images))

    def test_cifar_checkpoints_get_cifar_statistics(self):
        for size, patch, preset in ((32, 8, "dytox-cifar100"), (224, 56, "dytox-imagenet100")):
            state = build((2,), small(image_size=size, patch_size=patch)).state_dict()
            got, want = levit.DyTox.from_official(state).cfg, levit.DyToxConfig.preset(preset)
            assert (got.mean, got.std) == (want.mean, want.std)

    def test_missing_and_extra_keys_are_listed(self):
        state = dict(build((3, 2)).state_dict())
        del state["head.0.norm.bias"], state["sabs.1.attn.v.weight"]
        state |= {"cls_token": torch.zeros(1), "sabs.0.attn.rel": torch.zeros(1)}
        said = (
            r"missing keys: head\.0\.norm\.bias, sabs\.1\.attn\.v\.weight; "
            r"keys that do not belong: cls_token, sabs\.0\.attn\.rel"
        )
        with pytest.raises(ValueError, match=said):
            levit.DyTox.from_official(state)

    @pytest.mark.parametrize("key", ["pos_embed", "patch_embed.proj.weight", "head.1.head.weight", "task_tokens.1"])
    def test_any_key_may_be_the_missing_one(self, key):
        state = dict(build((3, 2)).state_dict())
        del state[key]
        with pytest.raises(ValueError, match=f"state_dict: missing keys: {key}"):
            levit.DyTox.from_official(state)

    def test_a_contradicting_override(self):
        with pytest.raises(ValueError, match=r"state_dict: .*: expected .*, got"):
            levit.DyTox.from_official(build((2,)).state_dict(), image_size=16)

    @pytest.mark.parametrize("before", [(), (4,), (1, 1, 1)], ids=str)
    def test_loading_takes_on_the_saved_tasks(self, before):
        source, model = build((3, 2)), build(before)
        model.load_state_dict(source.state_dict())
        images = random_images(2)
        assert model.classes_per_task == [3, 2] and torch.equal(model(images), source(images))
        assert torch.equal(model.training_outputs(images)[1], source.training_outputs(images)[1])

    def test_what_does_not_fit_changes_nothing(self):
        model = build((3, 2))
        before = copy.deepcopy(model.state_dict())
        for wrong in (build((3, 2), small(depth=3)), build((3, 2), small(embed_dim=16))):
            with pytest.raises(ValueError, match="state_dict: "):
                model.load_state_dict(wrong.state_dict())
            now = model.state_dict()
            assert before.keys() == now.keys() and all(torch.equal(before[key], now[key]) for key in before)


class TestInput:
    def test_bytes_are_255ths(self):
        model, images = build(), torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
        assert torch.equal(model(images), model(images.double() / 255))

    @pytest.mark.parametrize(
        ("images", "error", "said"),
        [
            (torch.zeros(2, 3, 9, 9).double(), ValueError, r"images: expected \[B, 3, 8, 8\], got \[2, 3, 9, 9\]"),
            (torch.zeros(2, 1, 8, 8).double(), ValueError, r"got \[2, 1, 8, 8\]"),
            (torch.zeros(3, 8, 8).double(), ValueError, r"got \[3, 8, 8\]"),
            (torch.zeros(2, 3, 8, 8), TypeError, "images: expected torch.float64 or torch.uint8, got torch.float32"),
            (np.zeros((2, 3, 8, 8)), TypeError, "images: expected a tensor, got ndarray"),
        ],
        ids=["size", "channels", "rank", "dtype", "array"],
    )
    def test_other_images_are_refused(self, images, error, said):
        with pytest.raises(error, match=said):
            build()(images)

    def test_an_empty_batch(self):
        assert build((3, 2))(random_images(0)).shape == (0, 5)


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("patch_size", 3, "a divisor of image_size 8"),
            ("num_heads", 5, "a divisor of embed_dim 12"),
            ("mean", (0.5,), r"a number per channel \(3\)"),
            ("std", (1.0, 0.0, 1.0), "numbers above 0"),
            ("classes_per_task", 3, "a divisor of the 4 classes after the first task"),
            ("first_classes", 0, "at least 1"),
            ("epochs", 0, "at least 1"),
            ("memory_size", -1, "at least 0"),
            ("divergence", -0.1, "0 or more"),
            ("attention", "other", "one of gpsa, mhsa"),
            ("rehearsal", "newest", "one of herding, random"),
            ("temperature", 0.0, "more than 0"),
            ("seed", -1, "0 to 2"),
        ],
    )
    def test_values_that_make_no_sense(self, field, value, said):
        with pytest.raises(ValueError, match=f"{field}: expected .*{said}"):
            small(**{field: value})

    def test_presets(self):
        cifar = levit.DyToxConfig.preset("dytox-cifar100")
        assert (cifar.image_size, cifar.patch_size, cifar.embed_dim, cifar.num_heads, cifar.depth) == (
            32,
            4,
            384,
            12,
            5,
        )
        assert (cifar.memory_size, cifar.divergence, cifar.learning_rate) == (2000, 0.1, 5e-4)
        imagenet = levit.DyToxConfig.preset("dytox-imagenet100")
        assert (imagenet.image_size, imagenet.patch_size) == (224, 16)
        assert levit.DyToxConfig(**cifar.to_dict()) == cifar
        with pytest.raises(ValueError, match="Did you mean 'dytox-cifar10'"):
            levit.DyToxConfig.preset("dytox-cifar1")


class TestBackbone:
    CFG = dict(backbone="test_vit", image_size=32, embed_dim=64, num_heads=4)

    def test_a_timm_model_stands_in_for_the_encoder(self):
        model = build((3, 2), small(**self.CFG), torch.float32)
        images = random_images(2, torch.float32, size=32)
        assert model(images).shape == (2, 5)
        normed = (images - model.mean) / model.std
        want = model.backbone.forward_features(normed)[:, 1:]
        assert torch.equal(model.encode(images), want)
        names = {name for name, _ in model.named_parameters() if name.startswith("backbone.")}
        assert len(model.encoder_parameters()) == len(names)
        other = levit.DyTox(small(**self.CFG))
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(images), model(images))

    def test_without_timm_it_is_said(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(ValueError, match="backbone: 'test_vit' needs timm, which is not installed"):
            levit.DyTox(small(**self.CFG))

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"backbone": "vit_of_no_size"}, "timm has no model 'vit_of_no_size'"),
            ({"embed_dim": 32}, "embed_dim: expected that of the backbone, got 32; 'test_vit' is 64 wide"),
            ({"backbone": "test_resnet"}, "backbone: 'test_resnet' is no vision transformer"),
        ],
        ids=["unknown", "width", "no transformer"],
    )
    def test_another_model(self, fields, said):
        with pytest.raises(ValueError, match=said):
            levit.DyTox(small(**(self.CFG | fields)))
