"""The closed-form baseline: what it learns, that order and batches leave no trace, and its place in a run."""

import copy
import io

import numpy as np
import pytest
import torch
from helpers import random_images, random_labels, small_config
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from test_lda import oracle_features
from test_learner import equal

from levit import cli, shared_space
from levit.lda import SHRINKAGE
from levit.methods import METHODS
from levit.methods import slda as slda_module

FIRST = 24


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(shared_space, "FIRST", FIRST)
    monkeypatch.setattr(slda_module, "ENOUGH", 5)


def make(dtype=torch.float64, **overrides):
    model, learner = METHODS["slda"].build(small_config(**(dict(shared_filters=5) | overrides)))
    model.to(dtype)
    return learner


def batches(count, size=6, dtype=torch.float64):
    """Noisy prototypes, one class after another."""
    cfg = small_config()
    prototypes = random_images(cfg, cfg.num_classes, dtype, seed=1)
    for i in range(count):
        labels = torch.full((size,), i * cfg.num_classes // count)
        yield (prototypes[labels] * 0.6 + 0.4 * random_images(cfg, size, dtype, seed=50 + i)), labels


def test_equals_scikit_learn_on_the_features():
    learner = make()
    stream = list(batches(20))
    for batch in stream:
        event = learner.observe(*batch)
        assert not event.expanded and event.loss is None and event.distances is None
    images, labels = (torch.cat(column) for column in zip(*stream, strict=True))
    query = random_images(learner.model.cfg, 30, seed=2)
    both = torch.cat([images, query]).numpy()
    space = oracle_features(both, learner.model.space.features, learner.model.cfg.seed, 5, fit=FIRST)
    priors = np.full(5, 0.2)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=SHRINKAGE, priors=priors)
    oracle.fit(space[: len(images)], labels.numpy())
    expected = oracle.decision_function(space[len(images) :]) - np.log(priors)
    np.testing.assert_allclose(learner.model(query).numpy(), expected, rtol=1e-6, atol=1e-6)


def test_nothing_is_forgotten():
    learner = make()
    for images, labels in batches(40):
        learner.observe(images, labels)
    images, labels = (torch.cat(column) for column in zip(*batches(20, size=3), strict=True))
    assert (learner.model(images).argmax(1) == labels).float().mean() > 0.95
    assert not learner.model.route(images).any() and learner.model.num_experts == 1


@pytest.mark.parametrize("count", [1, 3, 10], ids=["images wait", "still", "filters fixed"])
def test_answers_from_the_first_image_on_and_the_same_whatever_the_batches(count):
    one, other = make(), make()
    assert torch.equal(one.model(random_images(one.model.cfg, 2)), torch.zeros(2, 5, dtype=torch.float64))
    for images, labels in batches(count):
        one.observe(images, labels)
        for i in range(len(images)):
            other.observe(images[i : i + 1], labels[i : i + 1])
    query = random_images(one.model.cfg, 10, seed=3)
    logits = one.model(query)
    torch.testing.assert_close(logits, other.model(query), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([one.model(image[None]) for image in query]), logits, rtol=1e-9, atol=1e-9)
    assert (logits.isfinite().sum(1) == len({int(labels[0]) for _, labels in batches(count)})).all()


def test_images_without_a_label_give_filters_only():
    one, other = make(), make()
    images = random_images(one.model.cfg, FIRST, seed=4)
    one.observe(images, torch.full((FIRST,), -1))
    other.observe(images, random_labels(one.model.cfg, FIRST))
    assert equal(dict(one.model.space.features.state_dict()), dict(other.model.space.features.state_dict()))
    assert not one.model.space.lda.counts.any() and one.model.predict(images).confidence.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stop", [2, 9])
def test_stopping_leaves_no_trace(stop, dtype):
    whole, first, second = make(dtype), make(dtype), make(dtype)
    stream = list(batches(16, dtype=dtype))
    for batch in stream:
        whole.observe(*batch)
        second.observe(*batch)
    for batch in stream[:stop]:
        first.observe(*batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for batch in stream[stop:]:
        second.observe(*batch)
    assert equal(second.state_dict(), whole.state_dict())


def test_confidence_is_fitted_on_what_was_not_yet_learned(monkeypatch):
    """The factor of the logits is that of the held-out rows; overconfident rows lower it."""
    monkeypatch.setattr(shared_space, "REFRESH", 6)
    learner = make()
    for images, labels in batches(30):
        learner.observe(images, labels)
    model = learner.model
    assert model.taken.sum() > 10
    query = random_images(model.cfg, 20, seed=5)
    before = model.predict(query)
    expected, label = model(query).softmax(1).max(1)
    assert torch.equal(before.label, label) and before.known.all()
    # Three in five rows right, all of them sure by 10: the factor that fits is near log(3 / 2 · 4) / 10.
    model.logits[:] = 0.0
    for c in range(5):
        for row in range(slda_module.ROWS):
            model.logits[c, row, c if row % 5 < 3 else (c + 1) % 5] = 10.0
    after = model.predict(query)
    sharpness = (np.log(0.6 / 0.4) + np.log(4)) / 10
    expected = (sharpness * model(query)).softmax(1).max(1).values
    torch.testing.assert_close(after.confidence, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("images", "labels", "error", "said"),
    [
        (torch.zeros(0, 3, 6, 6), torch.zeros(0).long(), ValueError, "at least 1"),
        (torch.zeros(2, 1, 6, 6), torch.zeros(2).long(), ValueError, "images: expected"),
        (torch.full((2, 3, 6, 6), 2.0), torch.zeros(2).long(), ValueError, "images: expected finite values in"),
        (
            torch.zeros(2, 3, 6, 6),
            torch.tensor([0, 5]),
            ValueError,
            r"labels: expected 0 to 4 \(-1: none\), got 0 to 5",
        ),
        (torch.zeros(2, 3, 6, 6), torch.zeros(2), TypeError, "labels: expected torch.int64"),
    ],
    ids=["empty", "channels", "scale", "label", "label dtype"],
)
def test_bad_input_changes_nothing(images, labels, error, said):
    learner = make()
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(error, match=said):
        learner.observe(images.double(), labels)
    assert equal(before, learner.state_dict())


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Trained, evaluated and asked; the leaking protocol has nothing to work with."""
    monkeypatch.chdir(tmp_path)
    train = [
        "train",
        "digits",
        "--method",
        "slda",
        "--limit",
        "300",
        "--shared-filters",
        "20",
        "--out",
        "run",
        "--quiet",
    ]
    assert cli.main([*train, "--threads", "1"]) == 0
    assert "digits slda" in capsys.readouterr().out
    assert cli.main(["eval", "run"]) == 0
    assert float(capsys.readouterr().out.split("all classes: ")[1].split()[0]) > 80
    np.savez("some.npz", images=np.zeros((2, 8, 8), np.float32))
    assert cli.main(["predict", "run", "some.npz"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["image", "label", "expert", "confidence", "known"] and lines[1][2] == "0" and len(lines) == 3
    assert cli.main(["eval", "run", "--by-task"]) == 2
    assert "by_task: this method has no VAE" in capsys.readouterr().err
