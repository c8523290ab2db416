"""The build: what it recorded, how the native library loads or says why not, and its one op of equation 6."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from levit_kernels import native

ROOT = Path(__file__).parents[1]
AVAILABLE, TOLD = native.available()


def test_the_native_kernels_are_there_or_the_reason_is_told():
    info = native.build_info()
    if AVAILABLE:
        assert info["built"] and info["compiler"] in TOLD
        return
    assert os.environ.get("LEVIT_REQUIRE_NATIVE") != "1", f"LEVIT_REQUIRE_NATIVE=1, but {TOLD}"
    assert "reinstall levit-kernels" in TOLD
    assert info["built"] or info["reason"] in TOLD
    with pytest.raises(RuntimeError, match="levit-kernels"):
        native.load()


def test_the_record_says_how_it_was_built():
    info = native.build_info()
    if info.keys() == {"built", "reason"}:  # a checkout that was never installed
        assert not info["built"] and "build record" in info["reason"]
        return
    recorded = "built reason compiler flags torch cuda cuda_architectures cuda_reason date"
    assert info.keys() == set(recorded.split())
    assert info["built"] == (info["reason"] == "")
    assert info["cuda_reason"] and info["cuda"] == (ROOT / "levit_kernels" / "_cuda.so").exists()
    assert not any("march" in flag for flag in info["flags"]), "the library must run on other machines, too"


def test_importing_touches_neither_cuda_nor_the_library():
    code = """
import sys
from levit_kernels import native
native.build_info()
assert not native._loaded
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
print("clean")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "clean\n", done.stderr


RECORD = {"built": True, "reason": "", "compiler": "c++", "torch": "2.10.0"}


@pytest.mark.parametrize(
    ("record", "library", "reason"),
    [
        pytest.param(None, None, "no readable build record", id="never-built"),
        pytest.param("{", None, "no readable build record", id="torn-record"),
        pytest.param(
            {"built": False, "reason": "no working C++ compiler"}, None, "no working C++ compiler", id="no-cc"
        ),
        pytest.param(RECORD, None, "was built and is gone", id="library-gone"),
        pytest.param(RECORD, b"not a library", "do not load into torch", id="library-broken"),
    ],
)
def test_a_missing_library_is_told_with_its_reason_every_time(tmp_path, record, library, reason):
    package = tmp_path / "levit_kernels"
    package.mkdir()
    shutil.copy(native.__file__, package)
    if record is not None:
        text = record if isinstance(record, str) else json.dumps(record)
        (package / "_build_info.json").write_text(text)
    if library is not None:
        (package / "_C.abi3.so").write_bytes(library)
    spec = importlib.util.spec_from_file_location("native_of_another_package", package / "native.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)  # never fails, whatever is missing

    ok, told = copy.available()
    assert not ok and reason in told and "reinstall levit-kernels" in told
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            copy.load()
        assert str(error.value) == told


# Without the library there is nothing to compare; that it may be missing was the first test's matter.
if AVAILABLE:

    @pytest.fixture(autouse=True)
    def _restore_threads():
        threads = torch.get_num_threads()
        yield
        torch.set_num_threads(threads)

    def op(codes, query):
        return torch.ops.levit_native.latent_distance(codes, query)

    def oracle(codes, query):
        difference = codes.numpy().astype(np.float64) - query.numpy().astype(np.float64)
        return np.sqrt((difference**2).sum(-1)).mean(-1)

    def draw(*shape, dtype=torch.float32, seed=0):
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
    @pytest.mark.parametrize(
        ("k", "m", "length"),
        [
            (1, 1, 1),
            (3, 5, 7),  # shorter than one vector
            (2, 7, 8),
            (2, 9, 23),  # two vectors, one vector and a rest
            (4, 255, 31),
            (5, 257, 50),  # one row more than a block
            (8, 2000, 50),  # split-mnist
            (2, 1000, 200),  # split-cifar10
            (3, 4, 0),
        ],
    )
    def test_latent_distance_equals_numpy_in_float64(k, m, length, dtype):
        codes, query = draw(k, m, length, dtype=dtype), draw(m, length, dtype=dtype, seed=1)
        got = op(codes, query)
        assert got.dtype == dtype and got.shape == (k,)
        np.testing.assert_allclose(got.numpy(), oracle(codes, query), rtol=8 * torch.finfo(dtype).eps, atol=0)

    @pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "flipped-order"])
    def test_latent_distance_takes_any_strides(view):
        codes, query = draw(4, 30, 11), draw(30, 11, seed=1)
        if view == "transposed":
            codes, query = codes.permute(2, 0, 1).contiguous().permute(1, 2, 0), query.t().contiguous().t()
        elif view == "sliced":
            codes, query = draw(8, 60, 24)[1::2, ::2, 1:12], draw(60, 24, seed=1)[::2, 1:12]
        elif view == "expanded":
            codes, query = codes[:1].expand(4, 30, 11), query[:1].expand(30, 11)
        else:
            codes = codes.transpose(0, 1).contiguous().transpose(0, 1)
        before = codes.clone(), query.clone()
        np.testing.assert_allclose(op(codes, query).numpy(), oracle(codes, query), rtol=1e-6, atol=0)
        assert torch.equal(codes, before[0]) and torch.equal(query, before[1])

    def test_latent_distance_of_no_samples_and_of_no_experts():
        assert op(draw(3, 0, 5), draw(0, 5)).isnan().tolist() == [True] * 3
        assert op(draw(0, 4, 5), draw(4, 5)).shape == (0,)
        assert op(draw(0, 0, 5), draw(0, 5)).shape == (0,)

    def test_latent_distance_lets_nan_and_inf_through():
        codes, query = draw(3, 20, 9), draw(20, 9, seed=1)
        codes[0, 3, 2], codes[1, 19, 8] = torch.nan, torch.inf
        got = op(codes, query)
        assert got[0].isnan() and got[1].isinf() and got[2].isfinite()

    def test_a_long_memory_costs_no_accuracy():
        codes, query = torch.full((1, 1_000_000, 1), 0.1), torch.zeros(1_000_000, 1)
        assert op(codes, query).item() == pytest.approx(float(np.float32(0.1)), rel=1e-7)

    def test_latent_distance_is_the_same_for_any_number_of_threads():
        codes, query = draw(7, 1500, 50), draw(1500, 50, seed=1)
        results = []
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(op(codes, query))
        assert all(torch.equal(results[0], result) for result in results[1:])

    @pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc, which only Linux has")
    def test_the_work_is_shared_between_threads():
        code = """
import os, torch
from levit_kernels import native
native.load()
torch.set_num_threads(1)  # the tensors must not start the threads that the op is to start
codes, query = torch.ones(8, 2000, 50), torch.zeros(2000, 50)
torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
torch.ops.levit_native.latent_distance(codes, query)
print(len(os.listdir("/proc/self/task")) - before)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == "1\n", done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("codes", "query", "message"),
        [
            (draw(2, 3, 4).int(), draw(3, 4).int(), "codes must be float32 or float64, got Int"),
            (draw(2, 3, 4).half(), draw(3, 4).half(), "codes must be float32 or float64, got Half"),
            (draw(2, 3, 4), draw(3, 4).double(), "query must have the dtype of codes, Float, got Double"),
            (draw(3, 4), draw(3, 4), r"codes must be \[K, M, L\], got \[3, 4\]"),
            (draw(2, 3, 4), draw(4, 3), r"query must be \[M, L\] = \[3, 4\] to match codes \[2, 3, 4\], got \[4, 3\]"),
            (draw(2, 3, 4), draw(3), r"got \[3\]"),
            (draw(2, 3, 4), draw(1, 4), r"got \[1, 4\]"),
        ],
    )
    def test_bad_arguments_are_named(codes, query, message):
        with pytest.raises(RuntimeError, match="latent_distance: .*" + message):
            op(codes, query)

    def test_the_library_needs_no_cuda_build_of_torch():
        library = Path(native.__file__).with_name("_C.abi3.so").read_bytes()
        assert b"libtorch_cpu" in library
        assert b"libtorch_cuda" not in library and b"libcudart" not in library
