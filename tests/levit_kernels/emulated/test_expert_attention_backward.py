"""The backward pass of expert_attention's CUDA kernels, emulated, against autograd of the reference in float64."""

import pytest
import torch
from attention_case import GATES, arguments
from emulator import DTYPES, EmulatorError

from levit_kernels.cuda import expert_attention as cuda
from levit_kernels.expert_attention import expert_attention_reference

NAMES = ("patches", "w_embed", "b_embed", "w_qkv", "b_qkv", "gates")


def run(grad, args, wanted=NAMES):
    """-> the gradients by name."""
    needs = [name in wanted and x is not None for name, x in zip(NAMES, args, strict=True)]
    named = [name for name, need in zip(NAMES, needs, strict=True) if need]
    return dict(zip(named, cuda.expert_attention_backward(grad, *args, 0.2, [], needs), strict=True))


def autograd(grad, args, dtype):
    inputs = [x for x in args if x is not None]
    _, pull = torch.func.vjp(expert_attention_reference, *(x.to(dtype) for x in inputs))
    return dict(zip(NAMES, pull(grad.to(dtype)), strict=False))


def upstream(args):
    patches, w_qkv, gates = args[0], args[3], args[5]
    shape = (*patches.shape[:2], w_qkv.shape[3] * w_qkv.shape[4])
    return torch.randn(shape) if gates is not None else torch.randn(len(w_qkv), *shape).to(patches.dtype)


def assert_accurate(found, grad, args):
    """At most twice the error of plain torch in the same precision, in norm, and no bias in direction."""
    exact, plain = autograd(grad, args, torch.float64), autograd(grad, args, args[0].dtype)
    for name, got in found.items():
        expected = exact[name]
        error, allowed = (got.double() - expected).norm(), 2 * (plain[name].double() - expected).norm()
        assert error <= allowed + 1e-6 * expected.norm(), f"{name}: {error / expected.norm()} of its norm"


SIZES = {  # B, K, N, P, Q, H, d
    "mnist": (2, 1, 16, 49, 100, 3, 100),
    "odd": (3, 2, 7, 11, 13, 2, 9),
    "one": (1, 1, 1, 1, 1, 1, 1),
    "many tokens": (2, 2, 20, 70, 24, 2, 20),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_expert(emulator, size, dtype):
    args = arguments(dtype, *SIZES[size])
    grad = upstream(args)
    assert_accurate(run(grad, args), grad, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_gated_sum(emulator, gates, dtype):
    args = arguments(dtype, 3, 3, 16, 12, 24, 2, 20, GATES[gates](3, 3, 2))
    grad = upstream(args)
    assert_accurate(run(grad, args), grad, args)


def test_only_what_is_wanted(emulator):
    args = arguments(torch.float32, 3, 2, 16, 12, 24, 2, 20, torch.rand(2))
    grad = upstream(args)
    found = run(grad, args, wanted=("w_qkv", "gates"))
    assert set(found) == {"w_qkv", "gates"}
    assert_accurate(found, grad, args)


def test_zero_gates_let_nothing_through(emulator):
    args = arguments(torch.float32, 2, 2, 16, 12, 24, 2, 20, torch.tensor([1.0, 0.0]))
    grad = upstream(args)
    args[3][1, 0] = torch.nan
    found = run(grad, args)
    assert not found["w_qkv"][1].nan_to_num().any() and not found["b_qkv"][1].any()
    kept = autograd(grad, [x[:1] if i else x for i, x in enumerate(args)], torch.float64)
    for name in ("w_embed", "b_embed", "w_qkv", "b_qkv"):
        torch.testing.assert_close(found[name][:1], kept[name].float(), rtol=1e-4, atol=1e-4)


def test_more_tokens_than_a_block_holds_are_refused(emulator):
    args = arguments(torch.float32, 1, 1, 129, 4, 4, 1, 4)
    assert cuda.refuse("expert_attention_backward", (upstream(args), *args, 0.2, [], [True] * 6)).startswith("no block")
    with pytest.raises(RuntimeError, match="no block can hold these sizes"):
        run(upstream(args), args)


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    args = arguments(torch.float32, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    grad = upstream(args)
    assert_accurate(run(grad, args), grad, args)


def test_every_barrier_and_wait_is_needed(emulator):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    args = arguments(torch.float32, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    grad = upstream(args)
    run(grad, args)
    switches = emulator.switches("expert_layers.cuh", "expert_attention_backward.cuh", "matrix_product.cuh")
    assert len(switches) == 6
    for number, name in switches.items():
        emulator.switch_off(number)
        with pytest.raises((EmulatorError, AssertionError)):
            assert_accurate(run(grad, args), grad, args)
            pytest.fail(f"nobody misses {name}", pytrace=False)
