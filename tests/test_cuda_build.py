"""The build of the CUDA kernels: what it is asked for, what it finds, and what comes out where there is an nvcc."""

import ctypes
import importlib.util
import sys
from pathlib import Path

import pytest

from levit_kernels import native
from levit_kernels.cuda.runtime import LIBRARY, Runtime

BACKEND = Path(__file__).parents[1] / "build_backend"
KNOWN = ["75", "80", "86", "90", "100"]


@pytest.fixture
def cuda_library(monkeypatch):
    monkeypatch.syspath_prepend(BACKEND)
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    spec = importlib.util.spec_from_file_location("cuda_library", BACKEND / "cuda_library.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("8.0;9.0;10.0+PTX", [("80", False), ("90", False), ("100", True)]),
        ("8.6", [("86", True)]),
        ("7.5 8.0, 9.0a", [("80", False), ("90a", True)]),
        ("8.0+PTX;12.0", [("80", True)]),  # nvcc does not know the other
    ],
)
def test_architectures(cuda_library, asked, chosen):
    assert cuda_library.architectures(asked, KNOWN) == chosen


@pytest.mark.parametrize(("asked", "reason"), [("Ampere", "'Ampere', which is no number"), ("7.5", "none is sm_80 or")])
def test_architectures_that_cannot_be_built(cuda_library, asked, reason):
    with pytest.raises(LookupError, match=reason):
        cuda_library.architectures(asked, KNOWN)


def test_what_the_library_holds_is_told(cuda_library):
    assert cuda_library.codes([("80", False), ("90a", True)]) == ["sm_80", "sm_90a", "compute_90a"]


def test_levit_cuda(cuda_library, monkeypatch, tmp_path):
    monkeypatch.setenv("LEVIT_CUDA", "0")
    with pytest.raises(LookupError, match="LEVIT_CUDA=0"):
        cuda_library.build_cuda([], None, tmp_path / "_cuda.so", pytest.fail)
    monkeypatch.setenv("LEVIT_CUDA", "auto")
    with pytest.raises(LookupError, match="this torch is a build without CUDA"):
        cuda_library.build_cuda([], None, tmp_path / "_cuda.so", pytest.fail)
    monkeypatch.setenv("LEVIT_CUDA", "yes")
    with pytest.raises(SystemExit, match="LEVIT_CUDA must be 0, 1 or auto, got 'yes'"):
        cuda_library.wanted_cuda()


def test_jobs(cuda_library, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert cuda_library.jobs() == 3
    monkeypatch.delenv("MAX_JOBS")
    assert cuda_library.jobs() >= 1


def test_the_library_loads_without_a_gpu_or_says_why_it_is_not_there():
    info = native.build_info()
    if not info.get("cuda"):
        assert not LIBRARY.exists() and info.get("cuda_reason", info["reason"])
        return
    library = Runtime(ctypes.CDLL(str(LIBRARY))).library
    for op in ("expert_attention", "dkf_fuse", "latent_distance", "task_attention"):
        assert getattr(library, f"levit_{op}") and getattr(library, f"levit_{op}_backward")
    assert library.levit_elbo_loss and library.levit_expansion_distances
    assert info["cuda_architectures"] and library.levit_runtime_version() >= 12000
    assert library.levit_driver_version() >= 0  # 0 without a driver
    assert b"older" in library.levit_error_text(35) and b"TORCH_CUDA_ARCH_LIST" in library.levit_error_text(209)
    assert b"translate the PTX" in library.levit_error_text(222)
