"""The backward pass of expert_attention's CUDA kernels, emulated, against autograd of the reference in float64."""

import ctypes
from ctypes import c_void_p

import pytest
import torch
from attention_case import GATES, Call, arguments, prepare
from emulator import TYPES, EmulatorError

from levit_kernels.expert_attention import expert_attention_reference
from levit_kernels.gates import reduce_like

NAMES = ("patches", "w_embed", "b_embed", "w_qkv", "b_qkv", "gates")


class BackwardCall(ctypes.Structure):
    _fields_ = [
        ("forward", Call),
        *((name, c_void_p) for name in ("grad", "tokens", "by_tokens", "by_qkv", "by_gates", "by_patches")),
        *((name, c_void_p) for name in ("by_w_embed", "by_b_embed", "by_w_qkv", "by_b_qkv")),
    ]


def run(emulator, grad, args, processors=1, wanted=NAMES):
    """-> the gradients by name."""
    forward, _, _ = prepare(emulator, args, processors=processors)
    rows, qkv = forward.batch * forward.tokens, 3 * forward.heads * forward.depth
    call = BackwardCall(forward, emulator.upload(grad))
    for name, width in (("tokens", forward.width), ("by_tokens", forward.width), ("by_qkv", qkv)):
        setattr(call, name, emulator.allocate((forward.experts, rows, width), torch.float32))
    per_head = (forward.batch, forward.experts, forward.heads)
    if args[5] is not None:
        call.by_gates = emulator.allocate(per_head, torch.float32)
    for name, tensor in zip(NAMES[:5], args, strict=False):
        if name in wanted:
            setattr(call, f"by_{name}", emulator.allocate(tensor.shape, tensor.dtype))
    emulator.check(emulator.library.levit_expert_attention_backward(ctypes.byref(call), None))
    found = {}
    for name, tensor in zip(NAMES[:5], args, strict=False):
        if name in wanted:
            found[name] = emulator.download(getattr(call, f"by_{name}"), tensor.shape, tensor.dtype)
    if args[5] is not None:
        found["gates"] = reduce_like(emulator.download(call.by_gates, per_head, torch.float32), args[5])
    return found


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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_expert(emulator, size, dtype):
    args = arguments(dtype, *SIZES[size])
    grad = upstream(args)
    assert_accurate(run(emulator, grad, args), grad, args)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_gated_sum(emulator, gates, dtype):
    args = arguments(dtype, 3, 3, 16, 12, 24, 2, 20, GATES[gates](3, 3, 2))
    grad = upstream(args)
    assert_accurate(run(emulator, grad, args, processors=5), grad, args)


def test_only_what_is_wanted(emulator):
    args = arguments(torch.float32, 3, 2, 16, 12, 24, 2, 20, torch.rand(2))
    grad = upstream(args)
    found = run(emulator, grad, args, wanted=("w_qkv", "b_qkv"))
    assert set(found) == {"w_qkv", "b_qkv", "gates"}
    assert_accurate(found, grad, args)


def test_zero_gates_let_nothing_through(emulator):
    args = arguments(torch.float32, 2, 2, 16, 12, 24, 2, 20, torch.tensor([1.0, 0.0]))
    grad = upstream(args)
    args[3][1, 0] = torch.nan
    found = run(emulator, grad, args)
    assert not found["w_qkv"][1].nan_to_num().any() and not found["b_qkv"][1].any()
    kept = autograd(grad, [x[:1] if i else x for i, x in enumerate(args)], torch.float64)
    for name in ("w_embed", "b_embed", "w_qkv", "b_qkv"):
        torch.testing.assert_close(found[name][:1], kept[name].float(), rtol=1e-4, atol=1e-4)


def test_more_tokens_than_a_block_holds_are_refused(emulator):
    forward, _, _ = prepare(emulator, arguments(torch.float32, 1, 1, 129, 4, 4, 1, 4))
    call = BackwardCall(forward)
    assert emulator.library.levit_expert_attention_backward_fits(ctypes.byref(call)) == 0
    assert emulator.library.levit_expert_attention_backward(ctypes.byref(call), None) == -1


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    args = arguments(torch.float32, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    grad = upstream(args)
    assert_accurate(run(emulator, grad, args), grad, args)


def test_every_barrier_and_wait_is_needed(emulator):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    args = arguments(torch.float32, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    grad = upstream(args)
    run(emulator, grad, args)
    switches = emulator.switches("expert_layers.cuh", "expert_attention_backward.cuh", "matrix_product.cuh")
    assert len(switches) == 6
    for number, name in switches.items():
        emulator.switch_off(number)
        with pytest.raises((EmulatorError, AssertionError)):
            assert_accurate(run(emulator, grad, args), grad, args)
            pytest.fail(f"nobody misses {name}", pytrace=False)
