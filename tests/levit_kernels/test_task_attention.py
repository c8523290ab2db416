"""What task_attention promises beyond the suite of all ops: T separate passes to 1e-10, tokens that do not meet."""

import pytest
import torch
from op_cases import LAYOUTS, OPS, backend, evaluate, lay_out

from levit_kernels.composed.task_forms import folds
from levit_kernels.task_attention import task_attention, task_attention_reference

SIZES = OPS["task_attention"].sizes


def folded(B, T, N, heads, d, scale=None):
    return folds(heads, T, d, N)


def test_the_cases_take_both_forms():
    assert {name for name, sizes in SIZES.items() if folded(**sizes)} >= {"cifar", "odd"}
    assert not folded(**SIZES["many-tokens"]) and not folded(**SIZES["odd-many"])


def test_the_form_follows_from_the_count_of_operations():
    """CIFAR preset: 2 N D^2 + 2 T N D for keys and values and their use, T (2 N H D + D^2) without them."""
    counts = {t: (2 * 64 * 384**2 + 2 * t * 64 * 384, t * (2 * 64 * 12 * 384 + 384**2)) for t in range(1, 60)}
    assert all(folds(12, t, 32, 64) == (without < with_) for t, (with_, without) in counts.items())
    assert folds(12, 27, 32, 64) and not folds(12, 28, 32, 64)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend_name", ["torch", "torch-small-tiles", "cpu"])
def test_equals_separate_passes_in_float64(name, backend_name):
    args = OPS["task_attention"].make(torch.Generator().manual_seed(1), **SIZES[name])
    grad = torch.randn_like(OPS["task_attention"].reference(*args))
    want, want_grads = evaluate(OPS["task_attention"].reference, args, grad)
    with backend(backend_name):
        got, grads = evaluate(task_attention, args, grad)
    for x, y in zip([got, *grads], [want, *want_grads], strict=True):
        assert (x - y).norm() <= 1e-10 * y.norm()


@pytest.mark.parametrize("tokens", [3, 11])
def test_a_token_does_not_change_the_others(tokens):
    args = list(OPS["task_attention"].make(torch.Generator().manual_seed(2), **{**SIZES["odd"], "T": tokens}))
    before = task_attention(*args)
    args[0] = args[0].clone()
    args[0][1] += 100
    after = task_attention(*args)
    others = [t for t in range(tokens) if t != 1]
    torch.testing.assert_close(after[:, others], before[:, others], rtol=0, atol=0)
    assert not torch.allclose(after[:, 1], before[:, 1])


def native_arguments(dtype, B, T, N, H, d, scale=0.3):
    *tensors, heads, scale = OPS["task_attention"].make(torch.Generator().manual_seed(3), B, T, N, H, d, scale)
    return *(x.to(dtype) for x in tensors), heads, scale


def in_float64(*args):
    return task_attention_reference(*(x.double() if isinstance(x, torch.Tensor) else x for x in args))


def native(*args, out=None):
    """The kernel itself, also where folding is cheaper."""
    tokens, patches = args[:2]
    out = torch.empty(len(patches), *tokens.shape, dtype=tokens.dtype) if out is None else out
    with backend("cpu"):
        torch.ops.levit_native.task_attention(*args, out)
    return out


NATIVE_SIZES = {
    "cifar": dict(B=2, T=50, N=64, H=3, d=32),
    "several-groups-of-images": dict(B=5, T=50, N=64, H=12, d=32),
    "one-token": dict(B=3, T=1, N=6, H=2, d=8),
    "one-patch": dict(B=2, T=17, N=1, H=2, d=16),
    "odd": dict(B=3, T=19, N=7, H=3, d=5),
    "odd-depth": dict(B=2, T=33, N=31, H=2, d=37),
    "vectors-and-a-rest": dict(B=2, T=48, N=13, H=1, d=48),
    "ones": dict(B=1, T=1, N=1, H=1, d=1),
    "no-images": dict(B=0, T=3, N=4, H=2, d=5),
    "no-patches": dict(B=2, T=3, N=0, H=2, d=5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 4e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("size", NATIVE_SIZES)
def test_the_native_kernel(size, dtype, bound, layout):
    *tensors, heads, scale = native_arguments(dtype, **NATIVE_SIZES[size])
    tokens, patches = (lay_out(x, layout) for x in tensors[:2])
    weights = "transposed" if layout == "expanded" else layout  # expanded, they are of rank 1: sums would cancel
    args = tokens, patches, *(lay_out(x, weights) for x in tensors[2:]), heads, scale
    room = torch.full((len(patches) + 2, *tokens.shape), 7.0, dtype=dtype)
    native(*args, out=room[1:-1])
    want = in_float64(*args)
    assert (room[1:-1] - want).norm() <= bound * want.norm()
    assert (room[[0, -1]] == 7).all(), "the kernel wrote beside its result"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_native_kernel_subtracts_the_maximum(dtype):
    args = native_arguments(dtype, **NATIVE_SIZES["odd"], scale=1000.0)
    atol = 5e-3 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(native(*args), in_float64(*args).to(dtype), rtol=0, atol=atol)


@pytest.mark.parametrize("size", ["odd", "several-groups-of-images"])
def test_neither_threads_nor_other_images_change_a_bit(size):
    args, results = native_arguments(torch.float32, **NATIVE_SIZES[size]), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(native(*args))
    finally:
        torch.set_num_threads(before)
    want = results[0]
    assert all(torch.equal(result, want) for result in results)
    alone = [native(args[0], image[None], *args[2:]) for image in args[1]]
    assert torch.equal(torch.cat(alone), want)


NAMES = ["tokens", "patches", "wq", "wk", "wv", "wo", "bo", "heads", "scale", "out"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scale"])
def test_the_native_kernel_names_what_does_not_fit(name):
    args = [*native_arguments(torch.float32, **NATIVE_SIZES["odd"]), torch.empty(3, 19, 15)]
    which = NAMES.index(name)
    args[which] = 4 if name == "heads" else args[which].half() if name == "tokens" else args[which].double()
    with backend("cpu"), pytest.raises(RuntimeError, match=f"task_attention: {name} must"):
        torch.ops.levit_native.task_attention(*args)
