"""The triton backend without a GPU: its kernels in the interpreter, compiled for real targets, and its refusals."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from op_cases import OPS

from levit_kernels import BackendError, info, use_backend
from levit_kernels.backends import registry
from levit_kernels.backends import triton as backend

ROOT = Path(__file__).parents[2]
triton = pytest.importorskip("triton", reason="Triton is not installed")


def run(*arguments, **environment):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})


def interpret(capsys, *arguments):
    """Runs the interpreted suite in a process of its own and passes on what it counted."""
    done = run("-m", "pytest", "-q", "-o", "python_files=suite_*.py", "tests/levit_kernels/interpreted", *arguments,
               TRITON_INTERPRET="1", OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped|deselected)", done.stdout)}
    launches = int(re.search(r"interpreted launches: (\d+)", done.stdout).group(1))
    with capsys.disabled():
        print(f"\nTriton's interpreter: {counts['passed']} passed, {launches} launches")
    assert counts["passed"] and launches >= counts["passed"] / 2 and "skipped" not in counts


@pytest.mark.timeout(1200)  # half a minute on a core of its own; the interpreter suffers most from a crowded machine
def test_the_op_suite_in_the_interpreter(capsys):
    interpret(capsys)


@pytest.mark.full
def test_the_rest_of_the_op_suite_in_the_interpreter(capsys):
    interpret(capsys, "-m", "full")


@pytest.fixture
def fresh(monkeypatch):
    """The backend as if nobody had asked yet whether it can run."""
    backend.unavailable.cache_clear()
    monkeypatch.setattr(registry, "_told", set())
    yield monkeypatch
    backend.unavailable.cache_clear()


def test_missing(fresh):
    fresh.setitem(sys.modules, "triton", None)
    assert re.match(r"Triton cannot be imported \(.*\): `pip install triton`", backend.unavailable())


def test_too_old(fresh):
    fresh.setattr(triton, "__version__", "3.2.0+git")
    assert backend.unavailable() == "Triton 3.2.0+git is too old: 3.6 or newer is needed"


def test_no_gpu(fresh):
    fresh.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.unavailable().startswith("torch sees no GPU")


def test_a_driver_that_does_not_work(fresh):
    def broken():
        raise RuntimeError("libcuda.so\nis too old")

    fresh.setattr(torch.cuda, "is_available", lambda: True)
    fresh.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=broken)))
    assert backend.unavailable() == f"Triton {triton.__version__} has no usable driver: libcuda.so is too old"


@pytest.mark.parametrize("op", OPS)
def test_forcing_it_where_it_cannot_run_raises_the_reason(op, fresh):
    fresh.setattr(backend.torch.cuda, "is_available", lambda: False)
    with use_backend("triton"), pytest.raises(BackendError) as caught:
        OPS[op].function(*info.sample_arguments("cpu", torch.float32)[op])
    assert str(caught.value) == (
        f"levit_kernels.{op}: backend 'triton' was forced but cannot run: {backend.unavailable()}"
    )


@pytest.mark.usefixtures("fresh")
def test_tensors_of_a_cpu_never_ask_for_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op, args in info.sample_arguments("cpu", torch.float32).items():
            assert registry.choose(op, args).name in ("cpu", "torch")
    assert backend.unavailable.cache_info().misses == 0


def test_tensors_of_a_gpu_are_told_once_why_not():
    told = registry._told - {"triton"}
    elsewhere = registry.Backend("triton", backend.OPS, backend.refuse, lambda: "no driver", lambda device: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_told", told)
        patch.setitem(registry.backends(), "triton", elsewhere)
        args = info.sample_arguments("cpu", torch.float32)
        with pytest.warns(UserWarning, match="'triton' backend would run dkf_fuse faster but is not available: no dri"):
            registry.choose("dkf_fuse", args["dkf_fuse"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            registry.choose("dkf_fuse", args["dkf_fuse"])


def test_importing_stays_off_triton():
    code = """
import sys
from levit_kernels.backends import registry
registry.backends()
assert "triton" not in sys.modules
"""
    done = run("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "sizes, limit",
    [
        ({"N": 65}, "N = 64, got 65"),
        ({"Q": 257}, "Q = 256, got 257"),
        ({"d": 129}, "d = 128, got 129"),
        ({"B": 2**24, "P": 2**5}, None),  # 2**31 numbers and more, gone through with 64-bit offsets
        ({}, None),
    ],
)
@pytest.mark.parametrize("op", ["expert_attention", "expert_attention_backward"])
def test_attention_beyond_a_tile_is_refused_with_the_limit(op, sizes, limit):
    from levit_kernels.triton.expert_attention import too_large

    size = {"B": 2, "N": 4, "P": 5, "Q": 7, "d": 3, **sizes}
    patches = torch.empty(size["B"], size["N"], size["P"], device="meta")
    w_embed, b_embed = torch.empty(1, size["P"], size["Q"], device="meta"), torch.empty(1, size["Q"], device="meta")
    w_qkv, b_qkv = (torch.empty(1, *n, 3, 1, size["d"], device="meta") for n in ((size["Q"],), ()))
    args = (patches, w_embed, b_embed, w_qkv, b_qkv, None, 0.2)
    if op.endswith("_backward"):
        args = (patches, *args)
        if "B" in sizes:  # but not by the layers of the gradients
            limit = f"{2**31 - 1} numbers in a layer, got {2**26} x 32"
    refused = too_large(op, args)
    assert refused == (limit and f"takes at most {limit}")
