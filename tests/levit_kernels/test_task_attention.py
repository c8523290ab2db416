"""What task_attention promises beyond the suite of all ops: T separate passes to 1e-10, tokens that do not meet."""

import pytest
import torch
from op_cases import OPS, backend, evaluate

from levit_kernels.composed.task_forms import folds
from levit_kernels.task_attention import task_attention

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
@pytest.mark.parametrize("backend_name", ["torch", "torch-small-tiles"])
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
