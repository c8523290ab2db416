"""The emulated CUDA kernels under GCC's sanitizers, in place of the emulator's own checks.

Python itself is not built with them, so their libraries are loaded before it.
"""

import os
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


def python(sanitizer, *arguments):
    """-> exit status and output of a Python under a sanitizer."""
    found = [subprocess.check_output(["g++", f"-print-file-name={x}"], text=True) for x in LIBRARIES[sanitizer]]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(x.strip() for x in found)}
    environment["LEVIT_SANITIZE"] = sanitizer
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", LIBRARIES)
def test_the_emulated_kernels(sanitizer):
    """All but the mutation tests, which are about the emulator's own checks."""
    status, told = python(sanitizer, "-m", "pytest", "-q", EMULATED, "-k", "not is_needed")
    assert status == 0 and "Sanitizer" not in told and " passed" in told, told[-20000:]


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [("thread", "race", "data race"), ("address", "short", "use-after-poison")],
)
def test_they_see_what_is_wrong(sanitizer, fault, report):
    assert python(sanitizer, "-c", FAULTS, "none")[0] == 0
    status, told = python(sanitizer, "-c", FAULTS, fault)
    assert status and report in told, told
