"""Metrics against matrices worked out by hand."""

import numpy as np
import pytest
import torch
from stream_helpers import dataset
from torch import nn

from levit import metrics
from levit.streams import Stream
from levit.streams.scenarios import split

NAN = float("nan")
MATRIX = np.array(
    [
        [0.90, 0.10, 0.00],
        [0.60, 0.80, 0.20],
        [0.70, 0.50, 1.00],
    ]
)


def test_average_is_of_the_last_row():
    assert metrics.average_accuracy(MATRIX) == pytest.approx((0.7 + 0.5 + 1.0) / 3)


def test_anytime_averages_what_was_seen_at_each_step():
    assert metrics.anytime_accuracy(MATRIX) == pytest.approx((0.9 + (0.6 + 0.8) / 2 + (0.7 + 0.5 + 1.0) / 3) / 3)


def test_forgetting_counts_from_the_best_earlier_moment():
    # After the second experience the first fell from 0.9 to 0.6; after the third, from 0.9 to 0.7, and from 0.8 to 0.5.
    assert metrics.forgetting(MATRIX) == pytest.approx([0.3, (0.2 + 0.3) / 2])


def test_forgetting_ignores_what_was_right_before_it_was_seen_and_may_be_negative():
    matrix = [[0.5, 0.99, 0], [0.6, 0.4, 0], [0.9, 0.5, 1]]
    assert metrics.forgetting(matrix) == pytest.approx([0.5 - 0.6, ((0.6 - 0.9) + (0.4 - 0.5)) / 2])


def test_backward_transfer_compares_the_end_with_each_own_end():
    assert metrics.backward_transfer(MATRIX) == pytest.approx(((0.7 - 0.9) + (0.5 - 0.8)) / 2)


def test_rows_that_were_not_evaluated_are_left_out():
    matrix = MATRIX.copy()
    matrix[0] = NAN
    assert metrics.anytime_accuracy(matrix) == pytest.approx((0.7 + (0.7 + 0.5 + 1.0) / 3) / 2)
    assert metrics.forgetting(matrix) == [None, pytest.approx(((0.6 - 0.7) + (0.8 - 0.5)) / 2)]
    assert metrics.backward_transfer(matrix) == pytest.approx(0.5 - 0.8)


def test_only_the_end_was_evaluated():
    matrix = np.full((3, 3), NAN)
    matrix[2] = MATRIX[2]
    assert metrics.summary(matrix) == {
        "average_accuracy": pytest.approx(2.2 / 3),
        "anytime_accuracy": pytest.approx(2.2 / 3),
        "forgetting": None,
        "backward_transfer": None,
    }


def test_a_single_experience():
    assert metrics.summary([[0.5]]) == {
        "average_accuracy": 0.5,
        "anytime_accuracy": 0.5,
        "forgetting": None,
        "backward_transfer": None,
    }


def test_accuracy_is_per_sample_and_per_experience():
    predicted, labels = np.array([0, 1, 2, 2, 3, 0]), np.array([0, 1, 2, 3, 3, 3])
    experience = np.array([0, 0, 1, 1, 1, 1])
    assert metrics.accuracy(predicted, labels) == pytest.approx(4 / 6)
    assert metrics.accuracy_by_experience(predicted, labels, experience, 2) == [1.0, 0.5]


class Fake(nn.Module):
    """Image i of the test set has brightness i/255. Expert 0 explains the first images; each knows its own labels."""

    def __init__(self, labels):
        super().__init__()
        self.labels, self.batches = torch.tensor(labels), []

    def number(self, images):
        return (images[:, 0, 0, 0] * 255).round().long()

    def elbo_loss(self, images):
        n = self.number(images)
        return torch.stack([n.float(), 3.4 - n.float() / 10], dim=1)

    def route(self, images):
        return self.elbo_loss(images).argmin(1)

    def forward_expert(self, images, k):
        right = self.labels[self.number(images)]
        return nn.functional.one_hot(torch.where((right < 2) == (k == 0), right, 3 - right), 4).float()

    def answer(self, images):
        self.batches.append(len(images))
        routes = self.route(images)
        first, second = (self.forward_expert(images, k) for k in (0, 1))
        return torch.where(routes[:, None] == 0, first, second), routes


def twelve_images():
    """Twelve test images of four classes, two experiences."""
    data = dataset(test=(3, 3, 3, 3))
    return Stream(data, split(data, np.random.RandomState(0))).test


def test_predictions_cover_the_test_set_in_order_and_in_batches(monkeypatch):
    test = twelve_images()
    model = Fake(test.labels)
    monkeypatch.setattr(metrics, "EVALUATION_BATCH", 5)
    predicted, chosen = metrics.answers(model, test.images)
    assert model.batches == [5, 5, 2]
    routes = np.array([0, 0, 0, 0] + [1] * 8)  # n < 3.4 - n / 10
    assert (chosen == routes).all()
    right = (test.labels < 2) == (routes == 0)
    assert (predicted == np.where(right, test.labels, 3 - test.labels)).all()
    as_tensor = metrics.answers(model, test.images[:])
    assert (as_tensor[0] == predicted).all() and (as_tensor[1] == chosen).all()


def test_by_task_takes_one_expert_for_a_whole_experience():
    test = twelve_images()
    model = Fake(test.labels)
    number = np.arange(12)
    correct = 0
    for j in (0, 1):
        mine = number[test.labels // 2 == j]
        expert = int(mine.sum() > (3.4 - mine / 10).sum())
        correct += len(mine) if expert == j else 0
    assert metrics.by_task_accuracy(model, test, 2) == correct / 12


def test_route_accuracy_asks_whether_the_expert_ever_saw_the_kind():
    seen = [[5, 1, 0], [0, 7, 2]]
    chosen, kinds = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
    assert metrics.route_accuracy(chosen, kinds, seen) == pytest.approx(4 / 6)
    assert metrics.route_accuracy(chosen, np.array([2, 2, 2, 0, 0, 0]), seen) == 0


def test_evaluation_keeps_no_graph():
    test = twelve_images()
    model = Fake(test.labels)
    model.weight = nn.Parameter(torch.ones(1))
    grads = []
    model.route = lambda images: grads.append((model.weight * 2).requires_grad) or torch.zeros(len(images)).long()
    metrics.answers(model, test.images)
    assert grads == [False]
