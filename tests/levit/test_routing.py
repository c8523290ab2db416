"""Routing beyond the VAE loss, calibration and `known`: against the formulas in NumPy, on both models."""

import copy
import io
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import build, random_images, random_labels, small_config
from oracle import Oracle, softmax
from test_lda import oracle_features
from test_learner import equal, run

import levit
import levit_kernels
from levit import examples, shared_space
from levit.export import export_program
from levit.lda import SHRINKAGE
from levit.routing import Router, expert_log_probs

KINDS = {"reference": levit.reference.LEViT, "fused": levit.LEViT}
ROUTINGS = ("vae", "shared", "fused")
FIRST = 30
STATES = {}


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """Filters after 30 images, fits after 5 rows: the small streams of these tests get there."""
    monkeypatch.setattr(shared_space, "FIRST", FIRST)
    monkeypatch.setattr(examples, "ENOUGH", 5)


def config(**overrides):
    return small_config(**(dict(gamma=1e-9, shared_filters=6, calibration=True) | overrides))


def learned(kind, batches=24, dtype=torch.float64, **overrides):
    """A learner after a random stream: an expert more every five batches of four. Learned once, loaded again."""
    learner = levit.Learner(kind(config(**overrides)).to(dtype))
    key = (kind, batches, dtype, *overrides.items())
    if key not in STATES:
        run(learner, batches)
        STATES[key] = copy.deepcopy(learner.state_dict())
    else:
        learner.load_state_dict(copy.deepcopy(STATES[key]))
    return learner


def stream_of(cfg, batches):
    images = torch.cat([random_images(cfg, 4, seed=100 + i) for i in range(batches)])
    labels = torch.cat([random_labels(cfg, 4, seed=1000 + i) for i in range(batches)])
    return images.numpy(), labels.numpy(), np.arange(len(labels)) // 20  # the expert that learned from each


def oracle_class_logits(router, cfg, batches, query):
    """The shared space's logits of NumPy images [B, classes], from the stream itself."""
    images, labels, _ = stream_of(cfg, batches)
    features = router.shared.features
    both = np.concatenate([images[:FIRST], images, query])
    space = oracle_features(both, features, cfg.seed, cfg.shared_filters, fit=FIRST)
    rows, query = space[FIRST : FIRST + len(images)], space[FIRST + len(images) :]
    classes = np.arange(cfg.num_classes)
    means = np.array([rows[labels == c].mean(0) for c in classes])
    within = (rows - means[labels]).T @ (rows - means[labels]) / len(rows)
    within = (1 - SHRINKAGE) * within + SHRINKAGE * np.trace(within) / len(within) * np.eye(len(within))
    weights = np.linalg.solve(within, means.T)
    return query @ weights - 0.5 * (means.T * weights).sum(0)


def oracle_log_probs(router, cfg, batches, query):
    """log p(k | x) of NumPy images, from the stream itself."""
    _, labels, experts = stream_of(cfg, batches)
    classes = np.arange(cfg.num_classes)
    p_class = softmax(oracle_class_logits(router, cfg, batches, query))
    counts = np.array(
        [[np.sum((labels == c) & (experts == k)) for k in range(len(router.class_counts))] for c in classes]
    )
    return np.log(p_class @ (counts / counts.sum(1, keepdims=True)))


def test_shared_is_the_class_posterior_times_what_the_experts_have_seen(kind):
    learner = learned(kind, routing="shared")
    cfg, router = learner.cfg, learner.model.router
    assert learner.model.num_experts == 5
    query = random_images(cfg, 40, seed=77)
    expected = oracle_log_probs(router, cfg, 24, query.numpy())
    plan = router.plan()
    found = expert_log_probs(plan.features(query) @ plan.weights + plan.bias, plan.expert_of_class)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert learner.model.route(query).tolist() == expected.argmax(1).tolist()
    assert len(set(expected.argmax(1))) > 1


def test_fused_weighs_both_and_predicts_with_the_chosen_expert(kind):
    learner = learned(kind, routing="fused")
    model, cfg = learner.model, learner.cfg
    plan = model.router.plan()
    assert plan.fitted and plan.shared >= 0 and plan.vae >= 0 and plan.shared + plan.vae > 0
    query, oracle = random_images(cfg, 40, seed=77), Oracle(model)
    losses = np.stack([oracle.vae_loss(k, query.numpy(), np.zeros(cfg.latent_dim)) for k in range(5)], 1)
    for a, b in [(plan.shared, plan.vae), (0.3, 0.2)]:
        with patch.object(type(model.router.examples), "slopes", lambda *_, a=a, b=b: torch.tensor([a, b])):
            model.router._plan = None
            scores = a * oracle_log_probs(model.router, cfg, 24, query.numpy()) - b * losses
            routes = model.route(query)
            assert routes.tolist() == scores.argmax(1).tolist()
            logits = np.stack([oracle.logits(k, query.numpy()) for k in range(5)], 1)[np.arange(40), routes]
            np.testing.assert_allclose(model(query).detach().numpy(), logits, rtol=1e-6, atol=1e-8)
            prediction = model.predict(query)
            sharp = model.router.plan().sharpness
            assert prediction.label.tolist() == logits.argmax(1).tolist()
            assert prediction.expert.tolist() == routes.tolist()
            expected = softmax(scores).max(1) * softmax(sharp * logits).max(1)
            np.testing.assert_allclose(prediction.confidence.numpy(), expected, rtol=1e-6)
    assert len(set(routes.tolist())) > 1


@pytest.mark.parametrize("samples", [0, 3])
def test_sparing_routes_are_those_of_all_scores_at_fewer_vae_losses(samples):
    model = learned(levit.LEViT, routing="fused", route_samples=samples).model
    query = random_images(model.cfg, 60, seed=5)
    asked = []

    def one(images, k):
        asked.append(len(images))
        return model.expert_elbo_loss(images, k)

    for k in range(5):
        torch.testing.assert_close(model.expert_elbo_loss(query, k), model.elbo_loss(query)[:, k])
    for a, b in [(1.0, 0.0), (1.0, 1e-3), (0.3, 0.2), (0.0, 1.0), (1e-9, 1.0)]:
        with patch.object(type(model.router.examples), "slopes", lambda *_, a=a, b=b: torch.tensor([a, b])):
            model.router._plan = None
            expected = model.router.scores(query, model.elbo_loss).argmax(1)
            asked.clear()
            assert torch.equal(model.router.route_sparingly(query, model.elbo_loss, one), expected)
            assert torch.equal(model.route(query), expected) and torch.equal(model.answer(query)[1], expected)
            if (a, b) == (1.0, 1e-3):
                assert 60 <= sum(asked) < 120  # of 300
            if (a, b) == (1e-9, 1.0):
                assert sum(asked) == 300  # bounds alike: everyone has to be asked


def test_a_router_switches_to_another_rule_without_learning_anything():
    fused, vae = (learned(levit.LEViT, routing=routing).model for routing in ("fused", "vae"))
    query = random_images(fused.cfg, 40, seed=5)
    state = copy.deepcopy(fused.state_dict())
    fused.router.switch("vae")
    assert torch.equal(fused.route(query), fused.elbo_loss(query).argmin(1))
    fused.router.switch("shared")
    assert torch.equal(fused.route(query), learned(levit.LEViT, routing="shared").model.route(query))
    assert equal(dict(state), dict(fused.state_dict()))
    for router, wrong in [(fused.router, "all"), (vae.router, "shared")]:
        with pytest.raises(ValueError, match=f"routing: expected vae.* of this model, got '{wrong}'"):
            router.switch(wrong)


def test_vae_is_the_published_rule_and_keeps_the_published_state(kind):
    model = build(kind, small_config(), 3)
    query = random_images(model.cfg, 20)
    assert model.router is None and not any("router" in key for key in model.state_dict())
    assert torch.equal(model.route(query), model.elbo_loss(query).argmin(1))
    before = copy.deepcopy(model.state_dict())
    model.observe(query, random_labels(model.cfg, 20), 2)
    assert equal(dict(before), dict(model.state_dict()))
    prediction = model.predict(query)
    expected, label = model(query).softmax(1).max(1)
    assert torch.equal(prediction.label, label)
    torch.testing.assert_close(prediction.confidence, expected)
    assert prediction.known.all() and torch.equal(prediction.expert, model.route(query))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_neither_routing_nor_calibration_touches_what_is_learned(kind, routing):
    plain, other = (
        levit.Learner(kind(config(routing=r, calibration=c)).double()) for r, c in [("vae", 0 > 1), (routing, True)]
    )
    first, second = run(plain, 13), run(other, 13)
    assert [event.loss for event in first] == [event.loss for event in second]
    own = plain.model.state_dict()
    kept = {key: value for key, value in other.model.state_dict().items() if not key.startswith("router")}
    assert equal(dict(own), kept)


@pytest.mark.parametrize("routing", ["shared", "fused"])
def test_before_there_is_enough_the_vae_routes(kind, routing):
    learner = learned(kind, 7, routing=routing)  # two experts, 28 images
    query = random_images(learner.cfg, 20)
    assert learner.model.num_experts == 2 and not learner.model.router.shared.fixed
    assert torch.equal(learner.model.route(query), learner.model.elbo_loss(query).argmin(1))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_an_image_is_answered_the_same_alone(kind, routing):
    model = learned(kind, routing=routing).model
    query = random_images(model.cfg, 30, seed=9)
    together = model.predict(query)
    order = torch.randperm(30)
    mixed = model.predict(query[order])
    for i, column in enumerate(together):
        alone = torch.cat([model.predict(image[None])[i] for image in query])
        torch.testing.assert_close(alone, column, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mixed[i], column[order], rtol=1e-9, atol=1e-9)
    assert torch.equal(model(query).argmax(1), together.label) and torch.equal(model.route(query), together.expert)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_and_fused_agree(routing):
    reference, fused = (learned(kind, routing=routing, route_samples=2).model for kind in KINDS.values())
    query = random_images(reference.cfg, 30, seed=9)
    for one, other in zip(reference.predict(query), fused.predict(query), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    for (key, one), other in zip(reference.state_dict().items(), fused.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key} {text}")
    levit_kernels.accelerate(reference)
    torch.testing.assert_close(reference.predict(query).confidence, fused.predict(query).confidence)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("stop", [3, 8, 17], ids=["images wait", "filters fixed", "later"])
def test_resuming_equals_not_stopping(kind, routing, stop):
    straight = learned(kind, dtype=torch.float32, routing=routing)
    first = learned(kind, stop, dtype=torch.float32, routing=routing)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = levit.Learner(kind(first.cfg))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(resumed, 24, first=stop)
    assert equal(resumed.state_dict(), straight.state_dict())
    query = random_images(first.cfg, 20, torch.float32, seed=9)
    for one, other in zip(resumed.model.predict(query), straight.model.predict(query), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("experts", [1, 6])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_saving_and_loading_with_any_number_of_experts(kind, routing, experts, tmp_path):
    model = learned(kind, 5 * experts - 1, routing=routing).model
    assert model.num_experts == experts
    model.save(tmp_path / "model.pt")
    query = random_images(model.cfg, 20, seed=9)
    bigger = learned(kind, 17, routing=routing).model
    bigger.load_state_dict(model.state_dict())
    for loaded in (kind.load(tmp_path / "model.pt"), bigger):
        for one, other in zip(loaded.predict(query), model.predict(query), strict=True):
            assert torch.equal(one, other)
    if experts == 1:
        assert not model.predict(query).expert.any()


def test_a_state_of_another_routing_changes_nothing(kind):
    model, other = (learned(kind, 12, routing=r).model for r in ("vae", "fused"))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="state_dict: router.* is missing"):
        other.load_state_dict(model.state_dict())
    state = other.state_dict()
    with pytest.raises(ValueError, match="state_dict: router.* is not a key of this model"):
        model.load_state_dict(state)
    state["router.shared.lda.sums"] = state["router.shared.lda.sums"][:, :5]
    with pytest.raises(ValueError, match=r"router.shared.lda.sums: expected \[5, 48\], got \[5, 5\]"):
        other.load_state_dict(state)
    assert equal(dict(other.state_dict()), dict(before))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_exported_program(routing):
    model = learned(levit.LEViT, routing=routing).model
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own
        torch.export.save(export_program(model), file)
    file.seek(0)
    program = torch.export.load(file).module()
    with torch.no_grad():
        for count in (1, 30):
            images = random_images(model.cfg, count, seed=9)
            torch.testing.assert_close(program(images), model(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("what", ["one class", "no labels", "constant images", "one image at a time"])
def test_streams_of_little_variety(kind, routing, what):
    learner = levit.Learner(kind(config(routing=routing)).double())
    for i in range(16):
        images, labels = random_images(learner.cfg, 4, seed=i), random_labels(learner.cfg, 4, seed=i)
        if what == "one class":
            labels = torch.full_like(labels, 2)
        elif what == "no labels":
            labels = None
        elif what == "constant images":
            images = torch.full_like(images, 0.5)
        parts = [slice(j, j + 1) for j in range(4)] if what == "one image at a time" else [slice(None)]
        for part in parts:
            learner.observe(images[part], None if labels is None else labels[part])
    assert learner.model.num_experts > 2
    query = random_images(learner.cfg, 10, seed=99)
    prediction = learner.model.predict(query)
    assert learner.model(query).isfinite().all() and prediction.confidence.isfinite().all()
    assert ((0 <= prediction.confidence) & (prediction.confidence <= 1)).all()


def test_a_class_may_span_experts_and_an_expert_may_be_told(kind):
    """The counts go to the expert that is named; the class follows the expert that saw most of it."""
    model = kind(config(routing="shared")).double()
    model.add_expert()
    cfg = model.cfg
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(3, cfg.channels, cfg.image_size, cfg.image_size, generator=generator).double()
    show = lambda c, n: (prototypes[c] * 0.9 + 0.1 * random_images(cfg, n, seed=c * 100 + n)).clamp(0, 1)  # noqa: E731
    for c, n, expert in [(0, 40, 0), (1, 40, 1), (2, 30, 0), (2, 10, 1)]:
        model.observe(show(c, n), torch.full((n,), c), expert)
    assert model.router.class_counts[:, :3].tolist() == [[40, 0, 30], [0, 40, 10]]
    assert [model.route(show(c, 7)).tolist() for c in range(3)] == [[0] * 7, [1] * 7, [0] * 7]


def test_rows_are_the_latest_of_each_expert_and_compare_with_the_experts_there_were(kind, monkeypatch):
    monkeypatch.setattr(examples, "EVERY", 3)
    learner = levit.Learner(kind(config(routing="fused")).double())
    seen = []
    for i in range(12):
        images, labels = random_images(learner.cfg, 4, seed=100 + i), random_labels(learner.cfg, 4, seed=1000 + i)
        model = learner.model
        losses, logits = model.elbo_loss(images).detach(), model.forward_expert(images, model.num_experts - 1).detach()
        for j in range(4):
            if (4 * i + j) % 3 == 0:
                seen.append((model.num_experts - 1, losses[j], logits[j], labels[j]))
        learner.observe(images, labels)
    table = learner.model.router.examples
    for k in range(3):
        rows = [row for row in seen if row[0] == k]
        assert table.taken[k] == len(rows) >= 2
        for slot, (_, losses, logits, label) in enumerate(rows):
            torch.testing.assert_close(table.scores[k, slot, : k + 1, 1], -losses)
            assert table.scores[k, slot, k + 1 :, 1].isneginf().all() and table.labels[k, slot] == label
            torch.testing.assert_close(table.logits[k, slot], logits)


def test_the_oldest_rows_make_room():
    table = examples.Examples(config())
    for i in range(0, 300, 2):
        scores = torch.full((2, 1, 2), float(i))
        table.add(0, scores, torch.zeros(2, 5), torch.tensor([i % 5, (i + 1) % 5]))
    assert sorted(table.scores[0, :, 0, 0].tolist()) == sorted(2 * list(range(300 - examples.ROWS, 300, 2)))


def test_known_is_what_some_expert_saw_the_like_of(kind):
    """Log losses from a normal distribution: the documented rate of false flags, and the rule by its formula."""
    random = np.random.RandomState(0)
    model = kind(config()).double()
    model.add_expert()
    table = model.router.examples
    losses = np.exp(random.normal([[2.0], [3.0]], [[0.1], [0.2]], (2, examples.ROWS)))
    for k in range(2):
        scores = torch.full((examples.ROWS, 2, 2), -torch.inf)
        scores[:, k, 1] = -torch.tensor(losses[k])
        table.add(k, scores.double(), torch.zeros(examples.ROWS, 5).double(), torch.full((examples.ROWS,), -1))
    limits = table.known_limits(model.router.class_counts).numpy()
    logs = np.log(losses)
    middle = np.sort(logs, 1)[:, examples.ROWS // 2 - 1 : examples.ROWS // 2 + 1].min(1)
    deviation = np.sort(np.abs(logs - middle[:, None]), 1)[:, (examples.ROWS - 1) // 2]
    np.testing.assert_allclose(limits, middle + 3 * 1.4826 * deviation, rtol=1e-6)
    fresh = random.normal(2.0, 0.1, 100000)
    assert (fresh > limits[0]).mean() < 0.01
    told = [[np.exp(2.9), np.exp(2.9)], [np.exp(2.9), np.exp(4.5)], [np.exp(2.0), np.exp(4.5)]]
    with patch.object(model, "elbo_loss", lambda _: torch.tensor(told, dtype=torch.float64)):
        assert model.predict(random_images(model.cfg, 3)).known.tolist() == [True, False, True]


def test_logits_that_were_wrong_so_far_still_give_the_label(kind):
    """The sharpness is 0 then, and the confidence that of a guess."""
    model = learned(kind, routing="vae").model
    query = random_images(model.cfg, 10, seed=4)
    with patch.object(type(model.router.examples), "sharpness", lambda *_: 0.0):
        model.router._plan = None
        prediction = model.predict(query)
    assert torch.equal(prediction.label, model(query).argmax(1)) and (prediction.confidence <= 0.2).all()


def test_sharpness_and_slopes_are_fitted_on_held_out_rows():
    random = np.random.RandomState(1)
    table = Router(config(routing="fused"), experts=2).double().examples
    logits = 3 * random.randn(2, examples.ROWS, 5)
    labels = np.array([[random.choice(5, p=p) for p in rows] for rows in softmax(0.5 * logits)])
    for k in range(2):
        scores = torch.zeros(examples.ROWS, 2, 2).double()
        scores[:, k] = torch.tensor([1.0, 0.0])
        table.add(k, scores, torch.tensor(logits[k]), torch.tensor(labels[k]))
    seen = torch.full((2, 5), 30)
    assert 0.35 < table.sharpness(seen) < 0.65
    slopes = table.slopes([0, 1], seen)
    assert slopes[0] > 1 and slopes[1] == 0
    assert table.slopes([1], seen).tolist() == [0, 0]
    strangers = table.labels == 4  # a class that came after a change: its rows do not count
    table.logits[strangers] = torch.tensor([90.0, 0, 0, 0, -90]).double()
    assert table.sharpness(seen) < 0.1
    seen[:, 4] = 2
    assert 0.35 < table.sharpness(seen) < 0.65
