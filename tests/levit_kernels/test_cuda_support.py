"""Which machines the CUDA kernels refuse and what they tell about it, and what a launch that fails raises; no GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from levit_kernels import native
from levit_kernels.backends import cuda as backend
from levit_kernels.cuda import runtime, support
from levit_kernels.info import sample_arguments

GPU = torch.device("cuda", 0)
ARGUMENTS = sample_arguments("cpu", torch.float32)
BUILT = ["sm_80", "sm_90", "compute_90"]


@pytest.fixture
def machine(monkeypatch):
    """(capability, driver, runtime) of a machine with a GPU that torch sees, and a library built for BUILT."""

    def make(capability=(8, 0), driver=13000, runtime_version=13000):
        library = SimpleNamespace(
            levit_driver_version=lambda: driver,
            levit_runtime_version=lambda: runtime_version,
        )
        served = SimpleNamespace(library=library, serves=lambda device: True)
        monkeypatch.setattr(backend, "current", lambda: served)
        monkeypatch.setattr(backend, "device_of", lambda args: GPU)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
        monkeypatch.setattr(native, "build_info", lambda: {"cuda_architectures": BUILT})
        backend._unavailable.cache_clear()
        backend._cannot_run_on.cache_clear()
        return library

    yield make
    backend._unavailable.cache_clear()
    backend._cannot_run_on.cache_clear()


def refusal(op="latent_distance"):
    return backend.refuse(op, ARGUMENTS[op])


@pytest.mark.parametrize(("triton", "fallback"), [(None, "Triton"), ("Triton cannot be imported", "plain torch")])
def test_a_gpu_that_is_too_old_is_refused_with_its_architecture_and_the_fallback(
    machine, monkeypatch, triton, fallback
):
    machine(capability=(7, 5))
    monkeypatch.setattr(backend.triton_backend, "unavailable", lambda: triton)
    assert refusal() == f"needs sm_80 or newer, and this GPU is sm_75 (NVIDIA Test); left to {fallback}"


def test_a_gpu_without_code_is_refused_with_what_helps(machine, monkeypatch):
    machine(capability=(8, 6))
    assert backend._cannot_run_on(GPU) is None
    monkeypatch.setattr(native, "build_info", lambda: {"cuda_architectures": ["sm_90", "compute_90"]})
    backend._cannot_run_on.cache_clear()
    told = refusal()
    assert told.startswith("has no code for sm_86, which this GPU is, only sm_90, compute_90: reinstall")
    assert "TORCH_CUDA_ARCH_LIST=8.6 (NVIDIA Test); left to " in told


@pytest.mark.parametrize("info", [{}, {"cuda_architectures": []}, {"built": False, "reason": "no record"}])
def test_without_a_record_of_what_was_built_the_launch_decides(monkeypatch, info):
    monkeypatch.setattr(native, "build_info", lambda: info)
    assert support.no_code((8, 0)) is support.no_code((8, 6)) is None and "needs sm_80" in support.no_code((7, 5))


@pytest.mark.parametrize(
    ("code", "on", "not_on"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(9, 0), (7, 5), (12, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("compute_80", [(8, 0), (8, 6), (9, 0), (12, 1)], [(7, 5)]),
        ("sm_90a", [(9, 0)], [(8, 0), (10, 0)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
        ("compute_100f", [(10, 0), (10, 3)], [(12, 0), (9, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0)]),
    ],
)
def test_which_gpu_runs_which_code(code, on, not_on):
    assert all(support.runs(code, x) for x in on) and not any(support.runs(code, x) for x in not_on)


def test_a_driver_older_than_the_runtime_of_the_kernels_is_told_as_such(machine):
    machine(driver=12080)
    told = backend.unavailable()
    assert told.startswith("the NVIDIA driver is for CUDA 12.8, older than the runtime of the kernels, 13.0: update")
    assert not backend.serves("cuda")


@pytest.mark.parametrize("driver", [13000, 13010, 14000])
def test_a_driver_of_the_same_major_version_or_a_newer_one_will_do(machine, driver):
    machine(driver=driver, runtime_version=13010)
    assert backend.unavailable() is None and backend.serves("cuda")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update\nit."),
            "torch sees no GPU: The NVIDIA driver on your system is too old (found version 12020)",
        ),
        (AssertionError("Found no NVIDIA driver on your system. Please"), ": Found no NVIDIA driver on your system"),
        (None, "torch sees no GPU: it names no reason"),
    ],
)
def test_what_torch_says_about_its_driver_is_passed_on(machine, monkeypatch, error, told):
    def init():
        if error:
            raise error

    library = machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert support.no_gpu(library).endswith(told)


def test_a_torch_without_cuda_is_told(machine, monkeypatch):
    library = machine()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert support.no_gpu(library) == f"torch sees no GPU: {torch.__version__} is a build without CUDA"


@pytest.fixture
def failing_runtime():
    """A runtime of which every error is told by its number."""
    made = object.__new__(runtime.Runtime)
    made.library = SimpleNamespace(levit_error_text=lambda status: f"error {status}".encode())
    return made


def test_what_a_failed_launch_raises(failing_runtime):
    failing_runtime.check("levit_op", 0)
    with pytest.raises(RuntimeError, match="levit_op: no block can hold these sizes"):
        failing_runtime.check("levit_op", -1)
    with pytest.raises(RuntimeError, match="levit_op: error 209") as caught:
        failing_runtime.check("levit_op", 209)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError, match="levit_op: error 2"):
        failing_runtime.check("levit_op", 2)


class OutOfMemory(runtime.Runtime):
    """A GPU on CPU tensors whose every launch finds no memory."""

    def __init__(self):
        self.library = SimpleNamespace(
            levit_latent_distance_partials=lambda samples: 1, levit_error_text=lambda status: b"out of memory"
        )

    def serves(self, device):
        return True

    def start(self, function: str, call: ctypes.Structure, device: torch.device) -> None:
        self.check(function, runtime.OUT_OF_MEMORY)


def test_without_memory_an_op_raises_what_torch_does_and_arguments_keep_their_gradients():
    from levit_kernels import latent_distance, use_backend

    codes, query = (x.clone().requires_grad_() for x in ARGUMENTS["latent_distance"])
    with runtime.substitute(OutOfMemory()), use_backend("cuda"):
        with pytest.raises(torch.OutOfMemoryError, match="levit_latent_distance: out of memory"):
            latent_distance(codes, query)
    assert codes.grad is None and query.grad is None
