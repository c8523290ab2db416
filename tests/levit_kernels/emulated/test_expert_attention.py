"""expert_attention's CUDA kernels, emulated, against the reference in float64."""

import ctypes

import pytest
import torch
from attention_case import GATES, allowed, arguments, reference, run
from emulator import DTYPES, EmulatorError

from levit_kernels.cuda import expert_attention as cuda

SIZES = {  # B, K, N, P, Q, H, d
    "mnist": (5, 2, 16, 49, 100, 3, 100),
    "cifar": (2, 2, 16, 192, 100, 3, 100),
    "digits": (3, 2, 16, 4, 32, 2, 64),
    "odd": (3, 2, 7, 11, 13, 2, 9),
    "one": (1, 1, 1, 1, 1, 1, 1),
    "wide": (1, 1, 5, 20, 128, 1, 128),
}
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_expert(emulator, size, dtype):
    args = arguments(dtype, *SIZES[size])
    out = run(args)
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_gated_sum(emulator, gates, dtype):
    args = arguments(dtype, 3, 3, 16, 12, 24, 2, 20, GATES[gates](3, 3, 2))
    out = run(args)
    assert out.dtype == torch.float32
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gates_in_half_precision_leave_the_result_there(emulator, dtype):
    args = arguments(dtype, 2, 2, 16, 12, 24, 2, 20, torch.rand(2).to(dtype))
    out = run(args)
    assert out.dtype == dtype
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_gates_drop_whatever_an_expert_computes(emulator, dtype):
    gates = torch.tensor([[[1.0, 0.5], [0.0, 0.0]], [[0.0, 2.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    args = arguments(dtype, 3, 2, 16, 12, 24, 2, 20, gates)
    expected = reference(args)
    args[3][1, :, :, 0] = torch.nan  # expert 1, head 0: no image uses it
    out = run(args).double()
    assert (out - expected).abs().max() <= allowed([*args[:3], args[3].nan_to_num(), *args[4:]])
    assert not out[2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_that_nobody_uses_are_not_read(emulator, dtype):
    args = arguments(dtype, 2, 3, 16, 12, 24, 2, 20, torch.tensor([0.0, 0.7, 0.0]))
    emulator.withheld = [x[unused] for unused in (0, 2) for x in args[1:5]]
    assert (run(args).double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("processors", [2, 108])
def test_blocks_of_fewer_images(emulator, processors):
    emulator.processors = processors
    for dtype in (torch.bfloat16, torch.float32):
        args = arguments(dtype, 5, 2, 16, 12, 24, 2, 20, torch.rand(2))
        assert (run(args).double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_the_images_that_have_it_and_no_others(emulator, dtype):
    args = arguments(dtype, 3, 2, 16, 12, 24, 2, 20, torch.rand(2))
    args[0][1, 3, 2] = torch.nan
    out = run(args)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_useful_share_of_the_work_at_the_cifar_size(emulator):
    args = arguments(torch.bfloat16, *SIZES["cifar"])
    before = emulator.products()
    run(args)
    done = emulator.products() - before
    batch, experts, tokens, pixels, width, heads, depth = SIZES["cifar"]
    of_image = tokens * (pixels * width + 3 * width * heads * depth + 2 * tokens * heads * depth)
    assert batch * experts * of_image / done >= 0.85


def test_tokens_beyond_a_tile(emulator):
    args = arguments(torch.bfloat16, 3, 2, 20, 12, 24, 2, 20, torch.rand(2))
    assert fits(emulator, args) == 1
    out = run(args)
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


def fits(emulator, args):
    """2: on tensor cores, 1: on the others, 0: not at all."""
    call = cuda._sizes(emulator, args[0], args[3], args[5], 0.2)
    return emulator.library.levit_expert_attention_fits(ctypes.byref(call))


def test_which_kernel_holds_what(emulator):
    assert fits(emulator, arguments(torch.bfloat16, 2, 2, 16, 192, 100, 3, 100)) == 2
    assert fits(emulator, arguments(torch.float32, 2, 2, 16, 192, 100, 3, 100)) == 1
    assert fits(emulator, arguments(torch.float16, 1, 1, 16, 4, 100, 2, 130)) == 1
    assert fits(emulator, arguments(torch.float16, 1, 1, 16, 4, 100, 1, 100)) == 1
    too_large = arguments(torch.float32, 1, 1, 16, 4000, 8, 1, 8)
    assert fits(emulator, too_large) == 0
    assert cuda.refuse("expert_attention", (*too_large, 0.2)) == "no block can hold N=16, P=4000, Q=8, H=1, d=8"
    with pytest.raises(RuntimeError, match="no block can hold these sizes"):
        run(too_large)
    emulator.shared_bytes = 48 << 10
    assert fits(emulator, arguments(torch.float32, 1, 1, 16, 192, 100, 3, 100)) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_schedules(emulator, dtype, seed):
    emulator.schedule(seed)
    args = arguments(dtype, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    out = run(args)
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_every_barrier_and_wait_is_needed(emulator, dtype):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    args = arguments(dtype, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    expected, bound = reference(args), allowed(args)
    run(args)
    files = (
        ("expert_attention_mma.cuh",) if dtype == torch.bfloat16 else ("expert_layers.cuh", "expert_attention_any.cuh")
    )
    switches = emulator.switches(*files)
    assert len(switches) == (3 if dtype == torch.bfloat16 else 5)
    for number, name in switches.items():
        emulator.switch_off(number)
        try:
            out = run(args)
        except EmulatorError:
            continue
        assert not (out.double() - expected).abs().max() <= bound, f"nobody misses {name}"
