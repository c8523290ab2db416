"""Running statistics: every backend against nn.BatchNorm1d, which finds the batch's own ones itself."""

import pytest
import torch

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.move_statistics import move_statistics

NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
)
BACKENDS = [NATIVE, "torch", "reference"]
SIZES = {"two": ((20, 100), (7, 3)), "one": ((2, 1),), "none": ()}  # rows and width of every layer


def layers(name, dtype):
    """Norms with biases of the layers before, and what a batch gives each, bias left out."""
    generator = torch.Generator().manual_seed(0)
    for rows, width in SIZES[name]:
        norm = torch.nn.BatchNorm1d(width, momentum=0.3, dtype=dtype)
        norm.running_mean.copy_(torch.randn(width, generator=generator))
        norm.running_var.copy_(torch.rand(width, generator=generator))
        yield norm, torch.randn(width, generator=generator).to(dtype), torch.randn(rows, width, generator=generator)


def arguments(parts):
    norms, biases, batches = zip(*parts, strict=True) if parts else ((), (), ())
    statistics = [
        f.to(norms[0].weight.dtype) for x in batches for f in (x.double().mean(0), x.double().var(0, correction=0))
    ]
    buffers = [[n.running_mean for n in norms], [n.running_var for n in norms], [n.num_batches_tracked for n in norms]]
    return [*buffers, list(biases), statistics, [len(x) for x in batches], 0.3]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_buffers_are_those_of_batch_norm(name, backend, dtype, tolerance):
    moved, expected = list(layers(name, dtype)), list(layers(name, torch.float64))
    versions = [buffer._version for norm, *_ in moved for buffer in norm.buffers()]
    for _ in range(2):
        with use_backend(backend):
            move_statistics(*arguments(moved))
        for norm, bias, batch in expected:
            norm(batch.double() + bias)
    for (norm, *_), (other, *_) in zip(moved, expected, strict=True):
        for one, exact in zip(norm.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(one, exact.to(one.dtype), rtol=tolerance, atol=tolerance)
    after = [buffer._version for norm, *_ in moved for buffer in norm.buffers()]
    assert all(a > b for a, b in zip(after, versions, strict=True))  # what was derived from them knows


REFUSALS = [
    (lambda args: args[1].pop(), ValueError, "variances must be 2 like means, got 1"),
    (lambda args: args[4].pop(), ValueError, "statistics must be 4, two per layer, got 3"),
    (lambda args: args[5].__setitem__(0, 1), ValueError, r"rows must be at least 2 .*got \[1, 7\]"),
    (lambda args: args.__setitem__(6, 1.5), ValueError, r"momentum in \[0, 1\], got .* 1.5"),
    (lambda args: args[4].__setitem__(0, args[4][0][:5]), RuntimeError, "5"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_refusals_change_nothing(change, error, message, backend):
    args = arguments(list(layers("two", torch.float64)))
    before = [x.clone() for tensors in args[:3] for x in tensors]
    kept = [x for tensors in args[:3] for x in tensors]
    change(args)
    with use_backend(backend), pytest.raises(error, match=message):
        move_statistics(*args)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_what_is_not_dense_is_left_to_torch():
    args, expected = (arguments(list(layers("two", torch.float64))) for _ in range(2))
    wide = torch.stack([args[3][0], args[3][0]], 1)
    args[3][0] = wide[:, 0]
    with use_backend("reference"):
        move_statistics(*expected)
    move_statistics(*args)
    assert all(
        torch.equal(a, b) for x, y in zip(args[:3], expected[:3], strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        (0, lambda x: x[1:], "expected statistics of 1 layers, got 2"),
        (1, lambda x: [x[0][1:], x[1]], r"expected dense Double \[100\], got Double \[99\]"),
        (2, lambda x: [x[0].int(), x[1]], "counters must be int64"),
        (3, lambda x: [x[0].float(), x[1]], r"expected dense Double \[100\], got Float \[100\]"),
        (4, lambda x: [x[0], x[1][::2], *x[2:]], r"expected dense Double \[100\], got Double \[50\]"),
    ],
)
def test_the_kernel_itself_reads_nothing_that_is_not_there(argument, change, message):
    args = arguments(list(layers("two", torch.float64)))
    args[argument] = change(args[argument])
    with pytest.raises(RuntimeError, match=f"move_statistics: {message}"):
        torch.ops.levit_native.move_statistics(*args)
