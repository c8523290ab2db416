"""expert_attention's CUDA kernels, emulated, against the reference in float64."""

import ctypes

import pytest
import torch
from attention_case import GATES, allowed, arguments, prepare, reference, run
from emulator import A100, TYPES, EmulatorError

SIZES = {  # B, K, N, P, Q, H, d
    "mnist": (5, 2, 16, 49, 100, 3, 100),
    "cifar": (2, 2, 16, 192, 100, 3, 100),
    "digits": (3, 2, 16, 4, 32, 2, 64),
    "odd": (3, 2, 7, 11, 13, 2, 9),
    "one": (1, 1, 1, 1, 1, 1, 1),
    "wide": (1, 1, 5, 20, 128, 1, 128),
}
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_expert(emulator, size, dtype):
    args = arguments(dtype, *SIZES[size])
    # one processor: several images share a block, and the last block has images to spare
    out = run(emulator, args, processors=1)
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_gated_sum(emulator, gates, dtype):
    args = arguments(dtype, 3, 3, 16, 12, 24, 2, 20, GATES[gates](3, 3, 2))
    out = run(emulator, args, processors=2)
    assert out.dtype == torch.float32
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gates_in_half_precision_leave_the_result_there(emulator, dtype):
    args = arguments(dtype, 2, 2, 16, 12, 24, 2, 20, torch.rand(2).to(dtype))
    out = run(emulator, args)
    assert out.dtype == dtype
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_zero_gates_drop_whatever_an_expert_computes(emulator, dtype):
    gates = torch.tensor([[[1.0, 0.5], [0.0, 0.0]], [[0.0, 2.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    args = arguments(dtype, 3, 2, 16, 12, 24, 2, 20, gates)
    expected = reference(args)
    args[3][1, :, :, 0] = torch.nan  # expert 1, head 0: no image uses it
    out = run(emulator, args, processors=1).double()
    assert (out - expected).abs().max() <= allowed([*args[:3], args[3].nan_to_num(), *args[4:]])
    assert not out[2].any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_experts_that_nobody_uses_are_not_read(emulator, dtype):
    args = arguments(dtype, 2, 3, 16, 12, 24, 2, 20, torch.tensor([0.0, 0.7, 0.0]))
    expected = reference(args)
    call, shape, out_dtype = prepare(emulator, args)
    bound = allowed(args)
    call.w_qkv = emulator.allocate(args[3].shape, dtype)  # reading what was never written is an error
    size = args[3][1].numel() * dtype.itemsize
    emulator.library.levit_emu_upload(call.w_qkv + size, args[3][1].contiguous().data_ptr(), size)
    emulator.check(emulator.library.levit_expert_attention(ctypes.byref(call), None))
    assert (emulator.download(call.out, shape, out_dtype).double() - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nan_reaches_the_images_that_have_it_and_no_others(emulator, dtype):
    args = arguments(dtype, 3, 2, 16, 12, 24, 2, 20, torch.rand(2))
    args[0][1, 3, 2] = torch.nan
    out = run(emulator, args, processors=1)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_useful_share_of_the_work_at_the_cifar_size(emulator):
    args = arguments(torch.bfloat16, *SIZES["cifar"])
    before = emulator.library.levit_emu_products()
    run(emulator, args)
    done = (emulator.library.levit_emu_products() - before) * 2048
    batch, experts, tokens, pixels, width, heads, depth = SIZES["cifar"]
    of_image = tokens * (pixels * width + 3 * width * heads * depth + 2 * tokens * heads * depth)
    assert batch * experts * of_image / done >= 0.85


def test_tokens_beyond_a_tile(emulator):
    args = arguments(torch.bfloat16, 3, 2, 20, 12, 24, 2, 20, torch.rand(2))
    assert fits(emulator, args) == 1
    out = run(emulator, args, processors=1)
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


def fits(emulator, args, gpu=A100):
    return emulator.library.levit_expert_attention_fits(ctypes.byref(prepare(emulator, args, gpu)[0]))


def test_which_kernel_holds_what(emulator):
    assert fits(emulator, arguments(torch.bfloat16, 2, 2, 16, 192, 100, 3, 100)) == 2
    assert fits(emulator, arguments(torch.float32, 2, 2, 16, 192, 100, 3, 100)) == 1
    assert fits(emulator, arguments(torch.float16, 1, 1, 16, 4, 100, 2, 130)) == 1
    assert fits(emulator, arguments(torch.float16, 1, 1, 16, 4, 100, 1, 100)) == 1
    assert fits(emulator, arguments(torch.float32, 1, 1, 16, 4000, 8, 1, 8)) == 0
    assert fits(emulator, arguments(torch.float32, 1, 1, 16, 192, 100, 3, 100), dict(A100, shared_bytes=48 << 10)) == 0
    args = arguments(torch.float32, 1, 1, 16, 4000, 8, 1, 8)
    assert emulator.library.levit_expert_attention(ctypes.byref(prepare(emulator, args)[0]), None) == -1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_schedules(emulator, dtype, seed):
    emulator.schedule(seed)
    args = arguments(dtype, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    out = run(emulator, args, processors=1)
    assert (out.double() - reference(args)).abs().max() <= allowed(args)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_every_barrier_and_wait_is_needed(emulator, dtype):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    args = arguments(dtype, 3, 2, 16, 40, 24, 2, 20, torch.rand(2))
    expected, bound = reference(args), allowed(args)
    run(emulator, args, processors=1)
    files = (
        ("expert_attention_mma.cuh",) if dtype == torch.bfloat16 else ("expert_layers.cuh", "expert_attention_any.cuh")
    )
    switches = emulator.switches(*files)
    assert len(switches) == (3 if dtype == torch.bfloat16 else 5)
    for number, name in switches.items():
        emulator.switch_off(number)
        try:
            out = run(emulator, args, processors=1)
        except EmulatorError:
            continue
        assert not (out.double() - expected).abs().max() <= bound, f"nobody misses {name}"
