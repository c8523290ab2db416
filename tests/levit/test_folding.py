"""Batch norm folded from the statistics of a batch does what batch norm does, forward, backward and to its buffers."""

import copy

import pytest
import torch
from torch import nn

from levit.expert import linear_norm
from levit.folding import fold_batch_norm


def modules(inputs, outputs, dtype):
    linear, norm = nn.Linear(inputs, outputs, dtype=dtype), nn.BatchNorm1d(outputs, dtype=dtype)
    with torch.no_grad():
        for parameter in (norm.weight, norm.bias):
            parameter.copy_(torch.randn_like(parameter))
    return linear, norm


def outcome(function, linear, norm, x, grad):
    linear, norm = copy.deepcopy((linear, norm))
    for _ in range(2):  # running statistics that already moved once
        linear.zero_grad()
        norm.zero_grad()
        out = function(linear, norm, x)
        out.backward(grad)
    results = {"out": out.detach(), "weight": linear.weight.grad, "gain": norm.weight.grad, "shift": norm.bias.grad}
    return results | dict(norm.named_buffers()), linear.bias.grad


def folded(linear, norm, x):
    return nn.functional.linear(x, *fold_batch_norm(linear, norm, x))


def direct(linear, norm, x):
    return linear_norm(linear, norm, x, True)


@pytest.mark.parametrize("rows, inputs, outputs", [(1024, 49, 100), (8, 12, 7), (2, 3, 5), (3, 1, 1)])
def test_float64(rows, inputs, outputs):
    linear, norm = modules(inputs, outputs, torch.float64)
    x, grad = torch.rand(rows, inputs, dtype=torch.float64), torch.randn(rows, outputs, dtype=torch.float64)
    (got, bias), (want, _) = (outcome(f, linear, norm, x, grad) for f in (folded, direct))
    assert bias is None and got["num_batches_tracked"] == 2
    for key, expected in want.items():
        torch.testing.assert_close(got[key], expected, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("offset, contrast", [(0.0, 1.0), (0.9, 0.01), (0.0, 1e-4)], ids=["plain", "far off", "dark"])
def test_float32_is_as_exact_as_batch_norm(offset, contrast):
    """Also for pixels whose deviation is far below their mean, and for such as hardly differ at all."""
    linear, norm = modules(49, 100, torch.float32)
    x, grad = offset + contrast * torch.rand(1024, 49), torch.randn(1024, 100)
    exact, _ = outcome(direct, *(m.double() for m in copy.deepcopy((linear, norm))), x.double(), grad.double())
    (got, _), (plain, _) = (outcome(f, linear, norm, x, grad) for f in (folded, direct))
    for key, expected in exact.items():
        errors = [float((run[key] - expected).double().norm() / expected.double().norm()) for run in (got, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (key, errors)
