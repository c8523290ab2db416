"""Native code under GCC's sanitizers: the emulated CUDA kernels under each of them, the CPU kernels under two at once.

Python itself is not built with them, so their libraries are loaded before it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
EMULATED = "tests/levit_kernels/emulated"
OPTIONS = {  # Python keeps memory to its end, which is no leak; what the emulator copies for its threads is not theirs
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "ignore_interceptors_accesses=1",
}
LIBRARIES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
FAULTS = f"""
import sys
sys.path[:0] = [".", "{EMULATED}"]
import torch
from emulator import Emulator, build
from levit_kernels.cuda import latent_distance, task_attention
from levit_kernels.cuda.runtime import substitute

class Short(Emulator):
    def source(self, tensor):  # without its last number
        return super().source(tensor.flatten()[:-1])

fault = sys.argv[1]
emulator = (Short if fault == "short" else Emulator)(build())
with substitute(emulator):
    latent_distance.latent_distance(torch.ones(2, 3, 8), torch.ones(3, 8))
    args = (torch.randn(5, 12), torch.randn(1, 131, 12), *(torch.randn(12, 12) for _ in range(4)), torch.randn(12), 3)
    task_attention.task_attention(*args, None)
    if fault == "race":
        barriers = [n for n, name in emulator.switches("task_attention.cuh").items() if "__syncthreads" in name]
        emulator.switch_off(barriers[-1])
        task_attention.task_attention(*args, None)
"""


def python(sanitizer, *arguments, cwd=ROOT, **variables):
    """-> exit status and output of a Python under a sanitizer."""
    found = [subprocess.check_output(["g++", f"-print-file-name={x}"], text=True) for x in LIBRARIES[sanitizer]]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(x.strip() for x in found), **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", LIBRARIES)
def test_the_emulated_kernels(sanitizer):
    """All but the mutation tests, which are about the emulator's own checks."""
    status, told = python(sanitizer, "-m", "pytest", "-q", EMULATED, "-k", "not is_needed", LEVIT_SANITIZE=sanitizer)
    assert status == 0 and "Sanitizer" not in told and " passed" in told, told[-20000:]


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [("thread", "race", "data race"), ("address", "short", "use-after-poison")],
)
def test_they_see_what_is_wrong(sanitizer, fault, report):
    assert python(sanitizer, "-c", FAULTS, "none", LEVIT_SANITIZE=sanitizer)[0] == 0
    status, told = python(sanitizer, "-c", FAULTS, fault, LEVIT_SANITIZE=sanitizer)
    assert status and report in told, told


def test_the_cpu_kernels(tmp_path):
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.so", "__pycache__")
    project = Path(shutil.copytree(ROOT, tmp_path / "project", ignore=ignored))
    compiler = "g++ -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=project,
        env={**os.environ, "CXX": compiler, "LEVIT_CUDA": "0", "LEVIT_REQUIRE_NATIVE": "1"},
        check=True,
        capture_output=True,
    )
    tests = ["test_ops.py", "test_*_native.py", "test_expert_attention_training.py", "test_task_attention.py"]
    paths = [path for name in tests for path in sorted((project / "tests/levit_kernels").glob(name))]
    status, told = python(
        *("address", "-m", "pytest", "-q", *paths, "-k", "cpu or native or training"),
        cwd=project,
        LEVIT_REQUIRE_NATIVE="1",
    )
    assert status == 0 and "Sanitizer" not in told and " passed" in told, told[-20000:]
