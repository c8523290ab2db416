"""The op suite on the cuda backend, emulated: curated sizes, precisions and layouts, all gradients, against float64."""

import pytest
import torch
from op_cases import LAYOUTS, OPS, curated, to_dtype
from test_ops import check

from levit_kernels import BackendError, use_backend
from levit_kernels.backends import cuda as backend

CUDA_OPS = [op for op in OPS if op in backend.OPS]
SMALL = ("odd", "one", "all-rows", "mean-codes")  # at the others it is plain torch that takes its time
CASES = [
    pytest.param(op, sizes, dtype, id=f"{op}-{name}-{dtype}", marks=[] if quick else pytest.mark.full)
    for op in CUDA_OPS
    for name, sizes in curated(op)
    for dtype in ("f32", "bf16", "f16")
    for quick in [name.startswith(SMALL if dtype == "f32" else "one") and dtype != "f16"]
]


# behind each other for each case: plain torch is asked once
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 2, 3, 4))])
@pytest.mark.parametrize("op, sizes, dtype", CASES)
def test_result_and_gradients(emulator, op, sizes, dtype, seed):
    emulator.schedule(seed)
    check(op, sizes, dtype, "cuda")
    assert emulator.launches


LAID_OUT = [
    pytest.param(op, {**OPS[op].sizes["odd"], **extra}, id="-".join([op, *map(str, extra.values())]))
    for op in CUDA_OPS
    for extra in (
        [{"gates": "KH"}, {"gates": "BK1", "zeros": True}]
        if "H" in OPS[op].sizes["odd"]
        else [{}, {"T": 11}]
        if op == "task_attention"
        else [{}]
    )
]


@pytest.mark.parametrize("op, sizes", LAID_OUT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(emulator, op, sizes, layout):
    check(op, sizes, "f32", "cuda", layout, "expanded" if layout == "sliced" else "sliced")


def sample(op, dtype=torch.float32):
    return to_dtype(OPS[op].make(torch.Generator(), **OPS[op].sizes["ones"]), dtype)


def test_what_is_refused_and_why(emulator):
    with use_backend("cuda"):
        for op in CUDA_OPS:
            with pytest.raises(BackendError, match="takes float32, bfloat16 and float16, got torch.float64"):
                OPS[op].function(*sample(op, torch.float64))
        with pytest.raises(BackendError, match="no block can hold N=16, P=90000"):
            sizes = {"B": 1, "K": 1, "N": 16, "P": 90000, "Q": 1, "H": 1, "d": 1}
            OPS["expert_attention"].function(
                *to_dtype(OPS["expert_attention"].make(torch.Generator(), **sizes), torch.float32)
            )


def test_it_runs_only_where_it_is_forced(emulator):
    args = sample("latent_distance")
    OPS["latent_distance"].function(*args)
    assert not emulator.launches
    assert backend.BACKEND.reason_against("latent_distance", args).startswith("runs where it is forced")
    with use_backend("cuda"):
        OPS["latent_distance"].function(*args)
    assert emulator.launches == 1


def test_without_the_emulator_the_reason_is_told():
    if backend.unavailable() is None:
        return  # a machine with a GPU and the built kernels
    with use_backend("cuda"), pytest.raises(BackendError) as caught:
        OPS["latent_distance"].function(*sample("latent_distance"))
    assert backend.unavailable() in str(caught.value)
