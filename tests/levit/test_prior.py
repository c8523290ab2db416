"""The shared space's logits as a prior for an expert's label: against the formula in NumPy, where one side knows."""

import copy
import io
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import build, random_images, random_labels, small_config
from oracle import Oracle, softmax
from run_helpers import config as run_config
from run_helpers import go
from scipy.optimize import minimize
from test_learner import equal, run
from test_routing import KINDS, config, few_images, kind, learned, oracle_class_logits  # noqa: F401 (fixtures)

import levit
from levit import examples
from levit.export import export_program
from levit.inference import evaluate, load_model
from levit.routing import Router
from levit.runs import RunDirectory
from levit.train import RunOptions, build_stream

ROUTINGS = ("shared", "fused")
SEEN = torch.full((2, 5), 30)


def table_of(logits, shared_logits, labels):
    """Rows [2, ROWS, 5] of two experts that know all five classes."""
    table = Router(config(routing="fused", prior="shared"), experts=2).double().examples
    for k in range(2):
        scores = torch.zeros(examples.ROWS, 2, 2).double()
        table.add(k, scores, *(torch.tensor(part[k]) for part in (logits, labels, shared_logits)))
    return table


def drawn(own, shared, seed=0):
    """Random logits of both sides, and labels drawn from softmax(own·logits + shared·shared logits)."""
    random = np.random.RandomState(seed)
    logits, shared_logits = (3 * random.randn(2, examples.ROWS, 5) for _ in range(2))
    probabilities = softmax((own * logits + shared * shared_logits).reshape(-1, 5))
    labels = np.array([random.choice(5, p=p) for p in probabilities]).reshape(2, examples.ROWS)
    return logits, shared_logits, labels


@pytest.mark.parametrize(("own", "shared"), [(0.0, 1.0), (1.0, 0.0), (0.5, 0.8)], ids=["LDA", "experts", "both"])
def test_slopes_say_who_knows(own, shared):
    logits, shared_logits, labels = drawn(own, shared)
    slopes = table_of(logits, shared_logits, labels).label_slopes(SEEN).numpy()
    np.testing.assert_allclose(slopes, [own, shared], atol=0.25)  # what 128 labels can tell

    scores = np.stack([logits.reshape(-1, 5), shared_logits.reshape(-1, 5)], axis=-1)
    right = np.arange(len(scores)), labels.ravel()
    spread = ((scores - scores[right][:, None]) ** 2).sum((0, 1)) / (4 * len(scores))

    def objective(weights):
        ridge = 0.05 * (weights**2 * spread).sum()
        return ridge - np.log(softmax(scores @ weights)[right]).sum()

    likeliest = minimize(objective, [0.5, 0.5], bounds=[(0, None)] * 2, tol=1e-12).x
    np.testing.assert_allclose(slopes, likeliest, atol=1e-4)


def test_no_row_of_a_stranger_or_without_label_or_of_a_class_that_the_space_did_not_know():
    parts = drawn(0.5, 0.8)
    table = table_of(*parts)
    expected = table.label_slopes(SEEN)
    nonsense = torch.full((20, 5), 50.0).double()
    table.add(0, torch.zeros(20, 2, 2).double(), nonsense, torch.full((20,), -1), -nonsense)
    logits, shared_logits, labels = (part.reshape(-1, *part.shape[2:]) for part in parts)
    rest = Router(config(routing="fused", prior="shared"), experts=2).double().examples
    for k in range(2):
        rows = slice(20 if k == 0 else examples.ROWS, examples.ROWS * (k + 1))
        columns = (torch.tensor(part[rows]) for part in (logits, labels, shared_logits))
        rest.add(k, torch.zeros(len(labels[rows]), 2, 2).double(), *columns)
    torch.testing.assert_close(table.label_slopes(SEEN), rest.label_slopes(SEEN))

    table = table_of(*parts)
    fours = table.labels == 4
    table.logits[fours] = torch.tensor([90.0, 0, 0, 0, -90]).double()
    assert not torch.allclose(table.label_slopes(SEEN), expected, atol=0.2)
    strangers = SEEN.clone()
    strangers[:, 4] = 2  # the class came after a change: its rows do not count, though it may be answered
    assert table.label_slopes(strangers)[0] > 0.3
    table.shared_logits[fours, 4] = -torch.inf
    torch.testing.assert_close(table.label_slopes(SEEN), table.label_slopes(strangers), atol=0.15, rtol=0)


def test_too_few_rows_and_one_class_have_no_slopes():
    parts = drawn(0.5, 0.8)
    table = table_of(*parts)
    table.taken[:] = torch.tensor([examples.ENOUGH - 1, 0])
    assert table.label_slopes(SEEN) is None
    table = table_of(*parts[:2], np.full_like(parts[2], 2))
    alone = torch.zeros(2, 5, dtype=torch.int64)
    alone[:, 2] = 30
    assert table.label_slopes(alone) is None  # nothing to choose from
    assert table.label_slopes(torch.zeros_like(alone)) is None  # none learned


def test_rows_hold_what_the_space_said_before_it_saw_them(kind, monkeypatch):  # noqa: F811
    monkeypatch.setattr(examples, "EVERY", 3)
    monkeypatch.setattr("levit.shared_space.REFRESH", 4)
    learner = levit.Learner(kind(config(routing="fused", prior="shared")).double())
    seen = {k: [] for k in range(4)}
    for i in range(17):
        images, labels = random_images(learner.cfg, 4, seed=100 + i), random_labels(learner.cfg, 4, seed=1000 + i)
        said = learner.model.router.shared.recent_logits(images)
        seen[learner.model.num_experts - 1] += [said[j] for j in range(4) if (4 * i + j) % 3 == 0]
        learner.observe(images, labels)
    table = learner.model.router.examples.shared_logits
    for k, rows in seen.items():
        assert len(rows) >= 2
        torch.testing.assert_close(table[k, : len(rows)], torch.stack(rows))
        assert table[k, len(rows) :].isneginf().all()
    assert table[0].isneginf().all() and table[3, 0].isfinite().all()


@pytest.mark.parametrize("slopes", [(0.7, 0.4), (0.0, 0.3), (1.5, 0.0)])
def test_the_label_is_the_largest_of_the_sum_over_what_the_expert_learned(kind, slopes):  # noqa: F811
    learner = learned(kind, routing="fused", prior="shared")
    model, cfg, router = learner.model, learner.cfg, learner.model.router
    router.class_counts[[0, 1, 2, 3, 4], [1, 2, 0, 4, 3]] = 0  # every expert has not learned one class
    router.class_counts[2, 3] = 0
    query, oracle = random_images(cfg, 40, seed=77), Oracle(model)
    shared = oracle_class_logits(router, cfg, 24, query.numpy())
    with patch.object(type(router.examples), "label_slopes", lambda *_: torch.tensor(slopes)):
        router._plan = None
        routes = model.route(query)
        logits = np.stack([oracle.logits(k, query.numpy()) for k in range(5)], 1)[np.arange(40), routes]
        expected = np.where(router.class_counts.numpy()[routes] > 0, slopes[0] * logits + slopes[1] * shared, -np.inf)
        found, chosen = model.answer(query)
        assert torch.equal(chosen, routes) and len(set(routes.tolist())) > 2
        np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
        prediction, scores = model.predict(query), router.scores(query, model.elbo_loss)
        assert prediction.label.tolist() == expected.argmax(1).tolist()
        confidence = scores.softmax(1).amax(1).detach().numpy() * softmax(expected).max(1)
        np.testing.assert_allclose(prediction.confidence.numpy(), confidence, rtol=1e-6)
    router.switch(prior="none")
    np.testing.assert_allclose(model(query).detach().numpy(), logits, rtol=1e-6, atol=1e-8)


def test_an_expert_that_saw_no_label_has_all_classes_to_choose_from(kind):  # noqa: F811
    model = learned(kind, routing="fused", prior="shared").model
    query, router = random_images(model.cfg, 20, seed=3), model.router
    router.class_counts[1] = 0
    with patch.object(type(router.examples), "label_slopes", lambda *_: torch.tensor([0.5, 0.5])):
        router._plan = None
        plain = torch.zeros(20, 5).double()
        shared, routes = router.class_logits(query), torch.ones(20, dtype=torch.int64)
        torch.testing.assert_close(router.with_prior(plain, shared, routes), 0.5 * shared)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("what", ["too few rows", "no labels", "no use"])
def test_without_slopes_it_is_as_without_a_prior(kind, routing, what):  # noqa: F811
    learner = levit.Learner(kind(config(routing=routing, prior="shared")).double())
    for i in range(16):
        labels = None if what == "no labels" else random_labels(learner.cfg, 4, seed=1000 + i)
        learner.observe(random_images(learner.cfg, 4, seed=i), labels)
    query = random_images(learner.cfg, 20, seed=9)
    model, few = learner.model, 10**6 if what == "too few rows" else 5
    with (
        patch.object(examples, "ENOUGH", few),
        patch.object(examples, "fit_slopes", lambda scores, _: torch.zeros(scores.shape[-1]).double()),
    ):
        model.router._plan = None
        assert model.router.plan().prior is None
        predictions = [model.predict(query)]
        logits = model(query)
        model.router.switch(prior="none")
        predictions.append(model.predict(query))
        assert torch.equal(logits, model(query)) and logits.isfinite().all()
    for one, other in zip(*predictions, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("what", ["one class", "constant images", "one image at a time"])
def test_streams_of_little_variety(kind, what):  # noqa: F811
    learner = levit.Learner(kind(config(routing="fused", prior="shared")).double())
    for i in range(16):
        images, labels = random_images(learner.cfg, 4, seed=i), random_labels(learner.cfg, 4, seed=i)
        images = torch.full_like(images, 0.5) if what == "constant images" else images
        labels = torch.full_like(labels, 2) if what == "one class" else labels
        for part in [slice(j, j + 1) for j in range(4)] if what == "one image at a time" else [slice(None)]:
            learner.observe(images[part], labels[part])
    prediction = learner.model.predict(random_images(learner.cfg, 10, seed=99))
    assert ((0 <= prediction.confidence) & (prediction.confidence <= 1)).all()


@pytest.mark.parametrize("calibration", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_and_fused_agree_and_an_image_is_answered_the_same_alone(routing, calibration):
    options = dict(routing=routing, prior="shared", calibration=calibration, route_samples=2)
    reference, fused = (learned(each, **options).model for each in KINDS.values())
    query = random_images(reference.cfg, 30, seed=9)
    assert reference.router.plan().prior is not None
    torch.testing.assert_close(reference(query), fused(query), rtol=1e-6, atol=1e-8)
    for one, other in zip(reference.predict(query), fused.predict(query), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    for model in (reference, fused):
        together = model.predict(query)
        for i, column in enumerate(together):
            alone = torch.cat([model.predict(image[None])[i] for image in query])
            torch.testing.assert_close(alone, column, rtol=1e-9, atol=1e-9)
        assert torch.equal(model(query).argmax(1), together.label) and torch.equal(model.route(query), together.expert)


def test_resuming_equals_not_stopping(kind):  # noqa: F811
    options = dict(routing="fused", prior="shared", dtype=torch.float32)
    straight, first = learned(kind, **options), learned(kind, 8, **options)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = levit.Learner(kind(first.cfg))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(resumed, 24, first=8)
    assert equal(resumed.state_dict(), straight.state_dict())
    query = random_images(first.cfg, 20, torch.float32, seed=9)
    for one, other in zip(resumed.model.predict(query), straight.model.predict(query), strict=True):
        assert torch.equal(one, other)


def test_saved_and_loaded_and_exported(kind, tmp_path):  # noqa: F811
    model = learned(kind, routing="fused", prior="shared").model
    query = random_images(model.cfg, 20, seed=9)
    model.save(tmp_path / "model.pt")
    assert model.router.plan().prior is not None and torch.equal(kind.load(tmp_path / "model.pt")(query), model(query))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own
        program = export_program(model).module()
    with torch.no_grad():
        torch.testing.assert_close(program(query), model(query), rtol=1e-9, atol=1e-9)


def test_the_default_keeps_the_state_that_there_was_and_neither_touches_what_is_learned(kind):  # noqa: F811
    plain, other = (learned(kind, 13, routing="fused", prior=prior).model for prior in ("none", "shared"))
    states = [dict(model.state_dict()) for model in (plain, other)]
    assert set(states[1]) - set(states[0]) == {"router.examples.shared_logits"}
    assert equal(states[0], {key: states[1][key] for key in states[0]})
    assert config(routing="fused").prior == "none"
    before = copy.deepcopy(states[1])
    with pytest.raises(ValueError, match="state_dict: router.examples.shared_logits is missing"):
        other.load_state_dict(states[0])
    with pytest.raises(ValueError, match="state_dict: router.examples.shared_logits is not a key of this model"):
        plain.load_state_dict(before)
    assert equal(dict(other.state_dict()), before)


def test_what_makes_no_sense_is_refused(kind):  # noqa: F811
    with pytest.raises(ValueError, match="prior: expected 'none', for routing 'vae', which keeps no shared space, got"):
        small_config(prior="shared")
    with pytest.raises(ValueError, match="prior: expected one of none, shared, got 'lda'"):
        small_config(prior="lda", routing="fused")
    model = build(kind, config(routing="fused"), 2)
    with pytest.raises(ValueError, match="prior: expected none of this model, got 'shared'"):
        model.router.switch(prior="shared")
    model = build(kind, config(routing="fused", prior="shared"), 2)
    with pytest.raises(ValueError, match="routing: expected vae or shared or fused of this model, got 'all'"):
        model.router.switch("all", "none")
    assert (model.router.routing, model.router.prior) == ("fused", "shared")


def test_routing_by_the_vae_keeps_the_prior():
    model = learned(levit.LEViT, routing="fused", prior="shared").model
    query = random_images(model.cfg, 20, seed=9)
    model.router.switch("vae")
    assert torch.equal(model.route(query), model.elbo_loss(query).argmin(1))
    with patch.object(type(model.router.examples), "label_slopes", lambda *_: torch.tensor([0.0, 1.0])):
        model.router._plan = None
        learned_ones = model.router.class_counts[model.route(query)] > 0
        expected = model.router.class_logits(query).masked_fill(~learned_ones, -torch.inf)
        torch.testing.assert_close(model(query), expected)


def test_a_run_is_evaluated_with_and_without(tmp_path):
    cfg = run_config()
    go(tmp_path / "run", cfg=cfg)
    run, stream = RunDirectory(tmp_path / "run"), build_stream(cfg, RunOptions())
    seen = run.load_checkpoint()["progress"]["seen"]
    given, shared, none = (evaluate(load_model(run, prior=p), stream, seen=seen) for p in (None, "shared", "none"))
    assert given == shared and shared["accuracy"] != none["accuracy"]
    assert shared["images_by_expert"] == none["images_by_expert"] and shared["accuracy"] <= shared["route_accuracy"]
    go(tmp_path / "plain", cfg=run_config(prior="none"))
    with pytest.raises(ValueError, match="prior: expected none of this model, got 'shared'"):
        load_model(RunDirectory(tmp_path / "plain"), prior="shared")
