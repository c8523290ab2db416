"""task_attention's CUDA kernels, emulated, against the reference in float64 and its autograd."""

import pytest
import torch
from emulator import DTYPES, EmulatorError

from levit_kernels.composed import task_tokens
from levit_kernels.composed.task_forms import folds
from levit_kernels.cuda import task_attention as cuda
from levit_kernels.cuda.task_attention_backward import task_attention_backward
from levit_kernels.task_attention import task_attention_reference

SIZES = {  # B, T, N, H, d; few tokens are folded into W_k
    "folded": (2, 3, 64, 12, 8),
    "projected": (2, 23, 16, 4, 12),
    "published head": (1, 50, 64, 2, 32),
    "odd, folded": (3, 3, 5, 3, 5),
    "odd, projected": (3, 11, 5, 3, 5),
    "several blocks": (2, 67, 9, 1, 40),
    "several tiles of keys": (1, 5, 131, 3, 23),
    "one": (1, 1, 1, 1, 1),
}
NAMES = ("tokens", "patches", "wq", "wk", "wv", "wo", "bo")


def case(dtype, size, scale=None):
    batch, tokens, patches, heads, depth = SIZES[size]
    width = heads * depth
    tensors = [torch.randn(tokens, width), torch.randn(batch, patches, width)]
    tensors += [1.5 * torch.randn(width, width) / width**0.5 for _ in range(4)] + [torch.randn(width)]
    return *(x.to(dtype) for x in tensors), heads, scale


def autograd(grad, args, dtype):
    """-> result and gradients of the reference, in that precision."""
    *tensors, heads, scale = args
    tensors = [x.to(dtype) for x in tensors]
    out, pull = torch.func.vjp(lambda *x: task_attention_reference(*x, heads, scale), *tensors)
    return [out, *pull(grad.to(dtype))]


def assert_accurate(args):
    """At most twice the error of plain torch in the same precision, in norm, and four roundings."""
    tokens, patches = args[:2]
    grad = torch.randn(len(patches), *tokens.shape).to(tokens.dtype)
    found = [cuda.task_attention(*args), *task_attention_backward(grad, *args, [True] * 7)]
    exact, plain = (autograd(grad, args, dtype) for dtype in (torch.float64, tokens.dtype))
    for name, got, want, same in zip(("result", *NAMES), found, exact, plain, strict=True):
        assert got.dtype == tokens.dtype and got.shape == want.shape
        error, allowed = (got.double() - want).norm(), 2 * (same.double() - want).norm()
        little = 4 * torch.finfo(got.dtype).eps * want.norm()
        assert error <= allowed + little, f"{name}: {error / want.norm()} of its norm"


def test_the_sizes_take_both_forms():
    folded = [folds(heads, tokens, depth, patches) for _, tokens, patches, heads, depth in SIZES.values()]
    assert 3 <= sum(folded) <= len(folded) - 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_result_and_gradients(emulator, size, dtype):
    assert_accurate(case(dtype, size))


@pytest.mark.parametrize("size", ["odd, folded", "odd, projected"])
def test_a_scale_and_large_scores(emulator, size):
    assert_accurate(case(torch.float32, size, scale=0.7))
    args = case(torch.float32, size, scale=1000.0)
    expected = task_attention_reference(*(x.double() for x in args[:7]), *args[7:])
    torch.testing.assert_close(cuda.task_attention(*args), expected.float(), rtol=0, atol=5e-3)


@pytest.mark.parametrize("size", ["odd, folded", "odd, projected"])
def test_only_what_is_wanted(emulator, size):
    args = case(torch.float32, size)
    grad = torch.randn(3, *args[0].shape)
    exact = dict(zip(NAMES, autograd(grad, args, torch.float64)[1:], strict=True))
    for name in NAMES:
        (found,) = task_attention_backward(grad, *args, [name == other for other in NAMES])
        torch.testing.assert_close(found, exact[name].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", ["odd, folded", "odd, projected"])
def test_parts_of_a_batch(emulator, size, monkeypatch):
    monkeypatch.setattr(task_tokens, "SCRATCH_BYTES", 1)
    assert_accurate(case(torch.float32, size))
    assert emulator.launches == 3 * 3


def test_nan_stays_in_its_image(emulator):
    args = case(torch.float32, "odd, projected")
    args[1][1, 2, 3] = torch.nan
    out = cuda.task_attention(*args)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_more_patches_than_a_block_holds_are_refused(emulator):
    args = case(torch.float32, "odd, folded")
    emulator.shared_bytes = 40 << 10
    assert cuda.refuse("task_attention", args) is None
    assert cuda.refuse("task_attention_backward", (torch.zeros(3, 3, 15), *args, [True] * 7)) is None
    args = (args[0], torch.zeros(1, 400, 15), *args[2:])
    assert cuda.refuse("task_attention", args) == "no block can hold the scores of N=400"
    with pytest.raises(RuntimeError, match="no block can hold these sizes"):
        task_attention_backward(torch.zeros(1, 3, 15), *args, [True] * 7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", ["folded", "several blocks", "several tiles of keys"])
def test_schedules(emulator, size, seed):
    emulator.schedule(seed)
    assert_accurate(case(torch.float32, size))


def test_every_barrier_and_wait_is_needed(emulator):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    args = case(torch.float32, "several tiles of keys")
    assert_accurate(args)
    switches = emulator.switches("task_attention.cuh")
    assert len(switches) == 7
    for number, name in switches.items():
        emulator.switch_off(number)
        with pytest.raises((EmulatorError, AssertionError)):
            assert_accurate(args)
            pytest.fail(f"nobody misses {name}", pytrace=False)
