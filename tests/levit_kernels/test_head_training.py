"""The classifier's training loss with its gradients: every backend against autograd of the formula in float64."""

import pytest
import torch

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.head_training import head_training_loss

NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
)
BACKENDS = [NATIVE, "torch", "reference"]
SIZES = {  # B, inputs, hidden sizes, classes
    "mnist": (64, 480, (100,), 10),
    "cifar": (32, 300, (50, 20), 10),
    "odd": (7, 33, (13, 5, 3), 4),
    "lanes": (37, 50, (17,), 1),
    "two": (2, 5, (1,), 3),
    "no-hidden": (9, 21, (), 6),
}


def arguments(name, dtype, seed=0):
    batch, inputs, hidden, classes = SIZES[name]
    generator = torch.Generator().manual_seed(seed)
    weights, width = [], inputs
    for size in hidden:
        weights.append(torch.randn(size, width, generator=generator) * width**-0.5)
        weights += [1 + 0.3 * torch.randn(size, generator=generator), 0.3 * torch.randn(size, generator=generator)]
        width = size
    weights.append(torch.randn(classes, width, generator=generator) * width**-0.5)
    weights.append(0.3 * torch.randn(classes, generator=generator))
    features = torch.randn(batch, inputs, generator=generator) + 0.5
    labels = torch.randint(-1, classes, (batch,), generator=generator)
    return features.to(dtype).requires_grad_(), labels, [w.to(dtype).requires_grad_() for w in weights]


def formula(features, labels, weights):
    x, statistics = features, []
    for i in range(0, len(weights) - 2, 3):
        x = x @ weights[i].T
        mean, variance = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
        statistics += [mean.detach(), variance.detach()]
        x = (x - mean) / torch.sqrt(variance + 1e-5) * weights[i + 1] + weights[i + 2]
        x = torch.where(x > 0, x, 0.2 * x)
    logits = x @ weights[-2].T + weights[-1]
    rows = (labels >= 0).nonzero()[:, 0]
    if not len(rows):
        return logits.sum() * 0, statistics
    return (logits[rows].logsumexp(1) - logits[rows, labels[rows]]).mean(), statistics


def exact(features, labels, weights):
    leaves = [x.detach().double().requires_grad_() for x in (features, *weights)]
    loss, statistics = formula(leaves[0], labels, leaves[1:])
    return loss.detach(), torch.autograd.grad(loss, leaves), statistics


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 3e-5)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_loss_gradients_and_statistics_are_those_of_float64(name, backend, dtype, tolerance):
    features, labels, weights = arguments(name, dtype)
    if name == "two":
        labels = torch.tensor([1, 2])
    with use_backend(backend):
        loss, *statistics = head_training_loss(features, labels, weights)
        gradients = torch.autograd.grad(3 * loss, [features, *weights])
    expected, expected_gradients, expected_statistics = exact(features, labels, weights)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert one.dtype == dtype and (one / 3 - other).norm() <= tolerance * (other.norm() + 1)
    for one, other in zip(statistics, expected_statistics, strict=True):
        assert not one.requires_grad
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_label_there_is_nothing_to_learn(backend):
    features, labels, weights = arguments("odd", torch.float64)
    with use_backend(backend):
        loss = head_training_loss(features, torch.full_like(labels, -1), weights)[0]
        gradients = torch.autograd.grad(loss, [features, *weights])
    assert loss == 0 and not any(x.any() for x in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_one(backend):
    features, labels, weights = arguments("odd", torch.float32)
    with torch.no_grad():
        features[1, 3] = torch.nan
    with use_backend(backend):
        assert head_training_loss(features, labels, weights)[0].isnan()


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_any_number_of_threads_gives_the_same_bits():
    (features, labels, weights), before, seen = arguments("mnist", torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with use_backend("cpu"):
                loss = head_training_loss(features, labels, weights)[0]
            seen.append([loss.detach(), *torch.autograd.grad(loss, [features, *weights])])
    finally:
        torch.set_num_threads(before)
    for others in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], others, strict=True))


def test_refusals():
    features, labels, weights = arguments("odd", torch.float32)
    with pytest.raises(ValueError, match=r"head_training_loss: labels must have shape \[B=7\], got \[6\]"):
        head_training_loss(features, labels[1:], weights)
    with pytest.raises(TypeError, match="head_training_loss: labels must be int64, got torch.int32"):
        head_training_loss(features, labels.int(), weights)
    with pytest.raises(ValueError, match="head_training_loss: weights must be 3 per hidden layer and 2 more, got 10"):
        head_training_loss(features, labels, weights[1:])
    with pytest.raises(ValueError, match=r"head_training_loss: weights.gain1 must have shape \[h1=5\], got \[13\]"):
        head_training_loss(features, labels, [*weights[:4], weights[1], *weights[5:]])
    with pytest.raises(ValueError, match="head_training_loss: features must have B >= 2"):
        head_training_loss(features[:1], labels[:1], weights)
    with pytest.raises(ValueError, match="negative_slope and epsilon must be positive, got 0 and 1e-05"):
        head_training_loss(features, labels, weights, negative_slope=0)
