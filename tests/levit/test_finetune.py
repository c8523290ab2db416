"""The floor: what it learns, and that it keeps nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import random_images, random_labels, small_config

import levit
from levit.methods import METHODS
from levit.methods.finetune import Finetune, single_expert


def make(**overrides):
    return Finetune(single_expert(small_config(**overrides)).double())


def test_the_registry_builds_what_it_names():
    cfg = small_config()
    kinds = {name: method.build(cfg) for name, method in METHODS.items()}
    assert type(kinds["levit"][0]) is levit.LEViT and type(kinds["reference"][0]) is levit.reference.LEViT
    assert type(kinds["levit"][1]) is type(kinds["reference"][1]) is levit.Learner
    assert type(kinds["finetune"][1]) is Finetune
    assert [METHODS[name].uses_memory for name in ("levit", "reference", "finetune")] == [True, True, False]
    assert all(learner.model is model for model, learner in kinds.values())


def test_starts_as_expert_0_of_the_same_seed():
    model, other = single_expert(small_config()), levit.reference.LEViT(small_config())
    own = other.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())
    assert set(own) - set(model.state_dict()) == {"experts.0.gates"}


def test_a_step_is_adam_on_the_cross_entropy_of_this_batch():
    """Oracle: the expert written out with torch's own layers in training mode."""
    learner = make(updates_per_batch=1)
    cfg, expert = learner.model.cfg, copy.deepcopy(learner.model.active)
    images, labels = random_images(cfg, 5), random_labels(cfg, 5)
    event = learner.observe(images, labels)

    optimizer = torch.optim.Adam(expert.parameters(), lr=cfg.learning_rate)
    expert.train()
    n, p, c = cfg.image_size // cfg.patch_size, cfg.patch_size, cfg.channels
    parts = images.view(5, c, n, p, n, p).permute(0, 2, 4, 1, 3, 5).reshape(5, n * n, c * p * p)
    z = F.leaky_relu(expert.norm(expert.embed(parts).transpose(1, 2)).transpose(1, 2), 0.2)
    q, k, v = expert.qkv(z).view(5, n * n, 3, cfg.num_heads, cfg.head_dim).permute(2, 0, 3, 1, 4)
    x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(5, -1)
    for linear, norm in zip(expert.head.hidden, expert.head.norms, strict=True):
        x = F.leaky_relu(norm(linear(x)), 0.2)
    loss = F.cross_entropy(expert.head.out(x), labels)
    loss.backward()
    optimizer.step()

    assert event.loss == pytest.approx(loss.item(), rel=1e-12)
    assert not event.expanded and event.distances is None
    # A bias under batch norm, and the keys' bias under softmax, have a gradient of 0: Adam follows its rounding.
    idle = {"embed.bias", "qkv.bias", "head.hidden.0.bias", "head.hidden.1.bias"}
    assert all(expert.get_parameter(name).grad.abs().min() < 1e-15 for name in idle)
    state = learner.model.active.state_dict()
    for name, expected in expert.state_dict().items():
        if name not in idle:
            torch.testing.assert_close(state[name], expected, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.parametrize("variant", [dict(expert="dnn"), dict(pos_embed=True, out_proj=True), dict(fusion="concat")])
def test_learns_with_every_kind_of_expert(variant):
    learner = make(learning_rate=0.01, **variant)
    images, labels = random_images(learner.model.cfg, 6), random_labels(learner.model.cfg, 6)
    losses = [learner.observe(images, labels).loss for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_the_vae_is_never_trained_and_no_expert_is_added():
    learner = make()
    before = copy.deepcopy(learner.model.active.vae.state_dict())
    for i in range(10):
        learner.observe(random_images(learner.model.cfg, 4, seed=i), random_labels(learner.model.cfg, 4, seed=i))
    assert all(torch.equal(value, before[key]) for key, value in learner.model.active.vae.state_dict().items())
    assert learner.model.num_experts == 1


def test_forgets_the_first_classes_once_the_next_arrive():
    learner = make(learning_rate=0.01, num_classes=4)
    cfg = learner.model.cfg
    prototypes = random_images(cfg, 4, seed=1)
    for group in ([0, 1], [2, 3]):
        for i in range(40):
            labels = torch.tensor(group * 2)
            noise = 0.1 * random_images(cfg, 4, seed=100 + i)
            learner.observe((prototypes[labels] * 0.9 + noise).clamp(0, 1), labels)
    assert learner.model(prototypes).argmax(1).tolist()[2:] == [2, 3]
    assert set(learner.model(prototypes).argmax(1).tolist()[:2]) <= {2, 3}


def test_one_image_is_learned_with_running_statistics_that_stay():
    learner = make(learning_rate=0.01)
    cfg = learner.model.cfg
    learner.observe(random_images(cfg, 4), random_labels(cfg, 4))
    before = copy.deepcopy(learner.model.state_dict())
    image, label = random_images(cfg, 1, seed=9), random_labels(cfg, 1)
    losses = [learner.observe(image, label).loss for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    moved = {key for key, value in learner.model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved and not any("running" in key or "num_batches" in key for key in moved)


def test_stopping_leaves_no_trace():
    cfg = small_config()
    batches = [(random_images(cfg, 4, seed=i), random_labels(cfg, 4, seed=i)) for i in range(8)]
    whole, first, second = make(), make(), make(seed=9)
    for batch in batches:
        whole.observe(*batch)
    for batch in batches[:4]:
        first.observe(*batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in batches[4:]:
        second.observe(*batch)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in second.model.state_dict().items())


@pytest.mark.parametrize(
    ("images", "labels", "error", "said"),
    [
        (torch.zeros(0, 3, 6, 6), torch.zeros(0).long(), ValueError, "at least 1"),
        (torch.zeros(2, 1, 6, 6), torch.zeros(2).long(), ValueError, "images: expected"),
        (torch.zeros(2, 3, 6, 6), torch.zeros(3).long(), ValueError, "labels: expected"),
        (torch.zeros(2, 3, 6, 6), torch.tensor([0, 5]), ValueError, "labels: expected 0 to 4, got 0 to 5"),
        (torch.zeros(2, 3, 6, 6), torch.tensor([-1, 2]), ValueError, "labels: expected 0 to 4, got -1 to 2"),
        (torch.zeros(2, 3, 6, 6), torch.zeros(2), TypeError, "labels: expected torch.int64"),
    ],
    ids=["empty", "channels", "lengths", "label too large", "label negative", "labels float"],
)
def test_bad_input_changes_nothing(images, labels, error, said):
    learner = make()
    before = copy.deepcopy(learner.model.state_dict())
    with pytest.raises(error, match=said):
        learner.observe(images.double(), labels)
    assert all(torch.equal(value, before[key]) for key, value in learner.model.state_dict().items())


def test_a_wrong_number_of_updates():
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="updates_per_batch: expected a whole number of at least 1"):
            Finetune(single_expert(small_config()), updates_per_batch=wrong)
