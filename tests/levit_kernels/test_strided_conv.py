"""Strided convolutions, both directions: every backend against torch's own in float64, with gradients."""

import pytest
import torch
import torch.nn.functional as F

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.strided_conv import strided_conv, transposed_conv

NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
)
BACKENDS = [NATIVE, "torch", "reference"]
SIZES = {  # B, height, width, channels of the fine grid, of the coarse grid, taps a side
    "down": (3, 8, 8, 64, 128, 3),
    "up": (3, 8, 8, 128, 64, 4),
    "corner": (5, 2, 2, 70, 40, 4),
    "odd": (2, 7, 9, 17, 33, 3),
    "deep": (1, 3, 5, 16, 300, 5),
    "many": (61, 4, 4, 20, 13, 3),
    "pictures": (2, 6, 10, 3, 24, 4),
    "ones": (1, 1, 1, 16, 1, 3),
}


def arguments(name, to_fine, dtype, batch=None):
    images, height, width, fine, coarse, kernel = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images if batch is None else batch, height, width, coarse if to_fine else fine, generator=generator)
    weight = torch.randn(coarse, fine, kernel, kernel, generator=generator) * (coarse * kernel) ** -0.5
    bias = torch.randn(fine if to_fine else coarse, generator=generator)
    return [each.to(dtype).requires_grad_() for each in (x, weight, bias)]


def convolve(args, to_fine):
    return (transposed_conv if to_fine else strided_conv)(*args)


def exact(args, to_fine, grad=None):
    x, weight, bias = (each.detach().double().requires_grad_() for each in args)
    function = F.conv_transpose2d if to_fine else F.conv2d
    out = function(x.movedim(3, 1), weight, bias, stride=2, padding=1).movedim(1, 3)
    return out.detach(), None if grad is None else torch.autograd.grad(out, (x, weight, bias), grad.double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("to_fine", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_results_and_gradients_are_those_of_float64(name, backend, to_fine, dtype, tolerance):
    if name == "ones" and to_fine:
        name = "corner"  # three taps leave no pixel of one
    args = arguments(name, to_fine, dtype)
    with use_backend(backend):
        out = convolve(args, to_fine)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        gradients = torch.autograd.grad(out, args, grad)
    expected, expected_gradients = exact(args, to_fine, grad)
    assert out.is_contiguous() and out.dtype == dtype and out.shape == expected.shape
    for one, other in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        assert one.shape == other.shape and (one.detach() - other).norm() <= tolerance * (other.norm() + 1e-3)


@pytest.mark.parametrize("to_fine", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_and_turned_arguments(backend, to_fine):
    with use_backend(backend):
        args = arguments("odd", to_fine, torch.float32, batch=0)
        empty = convolve(args, to_fine)
        assert empty.shape == exact(args, to_fine)[0].shape
        for one, arg in zip(torch.autograd.grad(empty.sum(), args), args, strict=True):
            assert one.shape == arg.shape and not one.any()
        x, weight, bias = (each.detach() for each in arguments("down", to_fine, torch.float64))
        turned = [
            x.movedim(3, 1).contiguous().movedim(1, 3),
            weight.transpose(0, 1).contiguous().transpose(0, 1),
            bias.repeat_interleave(2)[::2],
        ]
        torch.testing.assert_close(convolve(turned, to_fine), exact((x, weight, bias), to_fine)[0])


@pytest.mark.parametrize("to_fine", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_reaches_the_pixels_that_it_meets_and_no_others(backend, to_fine):
    args = [each.detach() for each in arguments("up", to_fine, torch.float32)]
    args[0][1, 3, 3, 5] = torch.nan
    with use_backend(backend):
        found = convolve(args, to_fine)
    assert torch.equal(found.isnan(), exact(args, to_fine)[0].isnan()) and found.isnan().any()


@pytest.mark.parametrize("to_fine", [False, True])
def test_only_what_is_asked_for_has_a_gradient(to_fine):
    x, weight, bias = arguments("up", to_fine, torch.float32)
    out = convolve([x.detach(), weight, bias.detach()], to_fine)
    assert torch.autograd.grad(out.sum(), weight)[0].shape == weight.shape
    with torch.no_grad():
        assert not convolve([x, weight, bias], to_fine).requires_grad
    (by_x,) = torch.autograd.grad(convolve([x, weight, bias], to_fine).sum(), x, create_graph=True)
    if cpu.unavailable() is None:
        with pytest.raises(RuntimeError, match="levit_kernels.strided_conv is differentiable once"):
            by_x.sum().backward()


@pytest.mark.parametrize("to_fine", [False, True])
def test_under_autocast_everything_is_cast(to_fine):
    args = arguments("up", to_fine, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = convolve(args, to_fine)
        gradients = torch.autograd.grad(out.float().square().sum(), args)
    assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in gradients)
    expected = exact([x.bfloat16() for x in args], to_fine)[0]
    assert (out.double() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.skipif(cpu.unavailable() is not None, reason="native kernels")
@pytest.mark.parametrize("to_fine", [False, True])
def test_the_number_of_threads_changes_no_bit(to_fine):
    args = arguments("many", to_fine, torch.float32)
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = convolve(args, to_fine)
            found.append([out, *torch.autograd.grad(out.square().sum(), args)])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_bad_input():
    x, weight, bias = (each.detach() for each in arguments("odd", False, torch.float32))
    with pytest.raises(ValueError, match=r"strided_conv: weight must have shape \[C=33, F=17, k=3, k=3\], got"):
        strided_conv(x, weight[..., :2], bias)
    with pytest.raises(ValueError, match=r"strided_conv: bias must have shape \[C=33\], got \[32\]"):
        strided_conv(x, weight, bias[1:])
    with pytest.raises(TypeError, match=r"strided_conv: weight must be torch.float32 like x, got torch.float64"):
        strided_conv(x, weight.double(), bias)
    with pytest.raises(ValueError, match=r"strided_conv: x must have shape \[B, H, W, F\], got \[7, 9, 17\]"):
        strided_conv(x[0], weight, bias)
    with pytest.raises(ValueError, match="strided_conv: x must have at least 3 rows and columns"):
        strided_conv(x[:, :2], weight.new_ones(33, 17, 5, 5), bias)
    with pytest.raises(ValueError, match="transposed_conv: weight must have taps that leave pixels"):
        transposed_conv(x, weight.new_ones(17, 4, 1, 1), bias[:4])
