"""The op suite on the cuda backend, emulated: curated sizes, precisions and layouts, all gradients, against float64."""

import re

import pytest
import torch
from op_cases import LAYOUTS, OPS, curated, to_dtype
from test_ops import check

from levit_kernels import BackendError, use_backend
from levit_kernels.backends import cuda as backend
from levit_kernels.backends import gpu_choice
from levit_kernels.backends.registry import Backend
from levit_kernels.cuda import expert_attention as cuda_attention

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


def test_it_takes_what_triton_does_not(emulator):
    args = sample("latent_distance")
    OPS["latent_distance"].function(*args)
    assert emulator.launches == 1
    assert backend.explain("latent_distance", args).startswith("Triton does not: ")
    with use_backend("cuda"):
        assert backend.explain("latent_distance", args) == "forced"


@pytest.fixture
def triton_takes_all(monkeypatch):
    monkeypatch.setattr(gpu_choice.triton_backend, "BACKEND", Backend("triton", dict.fromkeys(backend.OPS), takes))
    monkeypatch.setattr(gpu_choice, "gpu_name", lambda device: "NVIDIA Test")


def takes(op, args):
    return None


def attention(dtype, **sizes):
    sizes = {**OPS["expert_attention"].sizes["cifar"], **sizes}
    return to_dtype(OPS["expert_attention"].make(torch.Generator(), **sizes), dtype)


def test_padding_decides_on_tensor_cores(emulator, triton_takes_all):
    """At the published size 87 % of CUDA's arithmetic are useful; powers of two are what Triton pads least."""
    args = attention(torch.bfloat16)
    assert backend.BACKEND.reason_against("expert_attention", args) is None
    ours, tritons = (int(x) for x in re.findall(r"(\d+)%", backend.explain("expert_attention", args)))
    assert ours == 87 and tritons < ours
    powers = attention(torch.bfloat16, Q=64, d=64, P=64)
    assert backend.explain("expert_attention", powers).startswith("of its arithmetic 100% are useful")


@pytest.mark.parametrize("name", ["mnist", "cifar", "digits"])
def test_the_share_of_useful_arithmetic_is_what_the_tensor_cores_do(emulator, name):
    args = attention(torch.float16, **{**OPS["expert_attention"].sizes[name], "B": 2, "K": 1})
    before = emulator.products()
    with use_backend("cuda"):
        OPS["expert_attention"].function(*args)
    patches, w_qkv = args[0], args[3]
    (batch, length, pixels), (_, width, _, heads, depth) = patches.shape, w_qkv.shape
    useful = batch * length * (pixels * width + heads * depth * (3 * width + 2 * length))
    share = cuda_attention.useful_share(patches, w_qkv, patches.device)
    assert share == pytest.approx(useful / (emulator.products() - before))


def test_without_tensor_cores_triton_takes_it(emulator, triton_takes_all):
    for op, args in (
        ("expert_attention", attention(torch.float32)),
        ("expert_attention", attention(torch.bfloat16, N=20)),
        ("latent_distance", sample("latent_distance")),
    ):
        assert backend.BACKEND.reason_against(op, args).startswith("left to Triton: ")


def test_a_measurement_decides(emulator, triton_takes_all, monkeypatch):
    measured = {"NVIDIA Test": {"expert_attention, bfloat16": "triton", "latent_distance, float32": "cuda"}}
    monkeypatch.setattr(gpu_choice, "MEASURED", measured)
    args = attention(torch.bfloat16)
    assert backend.BACKEND.reason_against("expert_attention", args) == "Triton was faster on NVIDIA Test"
    with use_backend("cuda"):
        assert backend.BACKEND.reason_against("expert_attention", args) is None
    assert backend.BACKEND.reason_against("latent_distance", sample("latent_distance")) is None
    assert backend.explain("latent_distance", sample("latent_distance")) == "CUDA was faster on NVIDIA Test"


def test_without_the_emulator_the_reason_is_told():
    if backend.unavailable() is None:
        return  # a machine with a GPU and the built kernels
    with use_backend("cuda"), pytest.raises(BackendError) as caught:
        OPS["latent_distance"].function(*sample("latent_distance"))
    assert backend.unavailable() in str(caught.value)
