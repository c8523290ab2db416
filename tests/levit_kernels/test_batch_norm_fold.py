"""Batch norm folded into the map before it: every backend against batch norm itself in float64."""

import pytest
import torch
import torch.nn.functional as F

from levit_kernels import use_backend
from levit_kernels.batch_norm_fold import batch_norm_fold

SIZES = {"mnist": (1024, 49, 100), "odd": (33, 12, 7), "wide": (40, 70, 18), "few": (5, 3, 5), "ones": (4, 1, 1)}


def arguments(name, dtype, offset=0.0, contrast=1.0):
    rows, inputs, outputs = SIZES[name]
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x = (offset + contrast * torch.rand(rows, inputs, generator=generator)).to(dtype)
    weights = [x.requires_grad_() for x in (new(outputs, inputs) * inputs**-0.5, 1 + 0.3 * new(outputs), new(outputs))]
    running = new(outputs), new(outputs).abs(), torch.tensor(4)
    return x, weights, new(outputs), running, [new(rows, outputs)]


def outcome(x, weights, bias, running, grad):
    """What the layer gives on the batch, its gradients, and what the running statistics become."""
    running = [r.clone() for r in running]
    w, b = batch_norm_fold(x, *weights, bias, running, momentum=0.1, epsilon=1e-5)
    out = F.linear(x, w, b)
    return [out.detach(), *torch.autograd.grad(out, weights, grad), *running[:2]], running[2]


def direct(x, weights, bias, running, grad, dtype):
    """The same of batch norm itself, computed in `dtype`."""
    weight, gain, shift = leaves = [w.detach().to(dtype).requires_grad_() for w in weights]
    mean, variance = (r.to(dtype, copy=True) for r in running[:2])
    out = F.batch_norm(F.linear(x.to(dtype), weight, bias.to(dtype)), mean, variance, gain, shift, True, 0.1, 1e-5)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad[0].to(dtype)), mean, variance]


def check(args, backend, dtype, tolerance):
    with use_backend(backend):
        found, batches = outcome(*args)
    assert batches == 5
    for one, plain, exact in zip(found, direct(*args, dtype), direct(*args, torch.float64), strict=True):
        error, plain = ((x.double() - exact).norm() for x in (one, plain))
        assert one.dtype == dtype and error <= 2 * plain + tolerance * (exact.norm() + 1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
@pytest.mark.parametrize("backend", ["torch", "reference", "cpu", None])
@pytest.mark.parametrize("name", SIZES)
def test_it_does_what_batch_norm_does(name, backend, dtype, tolerance):
    check(arguments(name, dtype), backend, dtype, tolerance)


def test_refusals():
    x, (weight, gain, shift), bias, running, _ = arguments("odd", torch.float32)
    with pytest.raises(ValueError, match=r"batch_norm_fold: gain must have shape \[Q=7\], got \[6\]"):
        batch_norm_fold(x, weight, gain[1:], shift, bias, running)
    with pytest.raises(ValueError, match="batch_norm_fold: x must have R >= 2"):
        batch_norm_fold(x[:1], weight, gain, shift, bias, running)
    with pytest.raises(TypeError, match="batch_norm_fold: weight must be torch.float32 like x"):
        batch_norm_fold(x, weight.double(), gain, shift, bias, running)
