"""The native CPU ops, and the emulated CUDA kernels in place of the emulator's own checks, under GCC's sanitizers.

Python itself is not built with them, so their libraries are loaded before it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_install import NOT_COPIED

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
EMULATED = "tests/levit_kernels/emulated"
OPTIONS = {  # Python keeps memory to its end, which is no leak; what the emulator copies for its threads is not theirs
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "ignore_interceptors_accesses=1",
}
LIBRARIES = {  # AddressSanitizer looks for the C++ library's throw at its start, when Python has not loaded it yet
    "address": ("libasan.so", "libubsan.so", "libstdc++.so.6"),
    "thread": ("libtsan.so",),
}
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

# Every access is checked by AddressSanitizer alone, through a call, in code that is optimised little: even so the
# compiler needs a minute for the attention kernels, whose loops are unrolled over all channels.
NATIVE_FLAGS = (
    "-fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow -fno-sanitize-recover=undefined "
    "--param asan-instrumentation-with-call-threshold=0 -g1"
)
NATIVE_TESTS = ("tests/levit_kernels", "--ignore-glob=*/emulated", "--ignore-glob=*triton*", "--ignore-glob=*cuda*")
# Kernels with a target of their own run here as they are shipped, one per width. A LEVIT_MULTIVERSION function, which
# is one loop whatever its vectors, is compiled once, for the plainest: the choice among its clones comes too early for
# a sanitizer. What the vectorizer makes of such a loop is not looked at, nor are steps from one part of a thread's
# scratch memory into the next.
WIDTHS = {"avx512": "Kernel<float, 16", "avx2": "Kernel<float, 8", "default": "Kernel<float, 4"}
NATIVE_FAULTS = """
import sys
import torch
from levit_kernels import native
native.load()
fault, ops = sys.argv[1], torch.ops.levit_native
shapes = (1, 4, 8), (1, 8, 8), (1, 8), (1, 8, 3, 1, 8), (1, 3, 1, 8)
weights = [torch.ones(shape) for shape in shapes]
codes = torch.ones(2, 3, 8)
if fault == "short":
    weights[1].untyped_storage().resize_(4 * 63)
if fault == "unaligned":
    codes = torch.frombuffer(bytearray(4 * 48 + 1), dtype=torch.float32, offset=1).view(2, 3, 8)
ops.latent_distance(codes, torch.ones(3, 8))
ops.expert_attention(*weights, None, 0.2)
"""


def python(sanitizer, *arguments, folder=ROOT, **variables):
    """-> exit status and output of a Python under a sanitizer."""
    found = [subprocess.check_output(["g++", f"-print-file-name={x}"], text=True) for x in LIBRARIES[sanitizer]]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(x.strip() for x in found)}
    environment |= {"LEVIT_SANITIZE": sanitizer, **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
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


@pytest.fixture(scope="module")
def native_project(tmp_path_factory):
    """A copy of the project whose native library is built for the sanitizers."""
    folder = tmp_path_factory.mktemp("native") / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    setup = folder / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))
    compiler = shlex.join(["g++", *NATIVE_FLAGS.split()])
    variables = {**os.environ, "CXX": compiler, "LEVIT_CUDA": "0", "LEVIT_REQUIRE_NATIVE": "1"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, env=variables, check=True)
    return folder


@pytest.fixture(params=WIDTHS)
def width(request):
    """A limit of torch's on the width of vectors, which this CPU reaches."""
    widest = torch.backends.cpu.get_cpu_capability()
    if request.param == "avx512" and widest != "AVX512" or request.param == "avx2" and widest == "DEFAULT":
        pytest.skip(f"the CPU, or ATEN_CPU_CAPABILITY, has no {request.param}")
    return request.param


def native_python(folder, width, *arguments):
    return python("address", *arguments, folder=folder, PYTHONPATH=str(folder), ATEN_CPU_CAPABILITY=width)


def test_the_native_ops(native_project, width):
    status, told = native_python(native_project, width, "-m", "pytest", "-q", "--capture=sys", *NATIVE_TESTS)
    assert status == 0 and "Sanitizer" not in told and "runtime error" not in told and " passed" in told, told[-20000:]


def test_they_see_what_is_wrong_in_a_native_op(native_project, width):
    """A tensor whose storage is short of one number, where the kernel of this width reads it."""
    assert native_python(native_project, width, "-c", NATIVE_FAULTS, "none")[0] == 0
    status, told = native_python(native_project, width, "-c", NATIVE_FAULTS, "short")
    assert status and "heap-buffer-overflow" in told and WIDTHS[width] in told, told
    status, told = native_python(native_project, width, "-c", NATIVE_FAULTS, "unaligned")
    assert status and "misaligned address" in told and "latent_distance.cpp" in told, told
