"""Builds levit_kernels/_C.abi3.so, the native ops on torch's stable ABI, and where nvcc is _cuda.so, the CUDA kernels;
everything else stands in pyproject.toml.

A missing compiler does not stop the installation: the package then runs in plain Python, and the reason goes to
levit_kernels/_build_info.json, from where levit_kernels.native tells it. LEVIT_REQUIRE_NATIVE=1 and LEVIT_CUDA=1 make
it an error, LEVIT_CUDA=0 leaves the CUDA kernels out.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from cuda_library import build_cuda, wanted_cuda  # noqa: E402
from environment import CXX_STANDARD, TORCH_MINIMUM, Torch, find_compiler, find_torch  # noqa: E402

COMPILE_FLAGS = [
    CXX_STANDARD,
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",  # otherwise every sqrt can become a call
    "-Wall",
    "-Wno-psabi",  # vectors wider than the baseline never cross a call, they are inlined
    "-Wextra",
    "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*TORCH_MINIMUM),
]  # not -fopenmp: torch::stable::parallel_for runs on torch's own threads


class BuildNative(build_ext):
    """Calls the compiler itself: the flags that this Python was built with may suit another compiler only."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".abi3.so"

    def run(self) -> None:
        root = Path() if self.inplace else Path(self.build_lib)
        library = root / self.get_ext_filename(self.extensions[0].name)
        library.parent.mkdir(parents=True, exist_ok=True)

        torch = find_torch()
        info = {"built": False, "reason": "", "compiler": "", "flags": COMPILE_FLAGS}
        try:
            if torch is None:
                raise LookupError("torch was not installed when levit-kernels was built")
            if not torch.new_enough:
                raise LookupError(f"levit-kernels was built beside torch {torch.version}, which is older than 2.10")
            compiler = find_compiler()
            info["compiler"] = compiler.version
            compile_library(shlex.split(compiler.command), self.extensions[0], torch, library)
            info["built"] = True
        except (LookupError, subprocess.CalledProcessError) as error:
            info["reason"] = describe(error)
            library.unlink(missing_ok=True)  # an older build must not outlive a failed one

        cuda_library = library.with_name("_cuda.so")
        info["torch"] = torch.version if torch else ""
        info |= {"cuda": False, "cuda_architectures": [], "cuda_reason": ""}
        try:
            built = build_cuda(sorted(glob.glob("csrc/cuda/*.cu")), torch, cuda_library, run)
            info["cuda_architectures"], info["cuda_reason"] = built
            info["cuda"] = True
        except (LookupError, subprocess.CalledProcessError) as error:
            info["cuda_reason"] = describe(error)
            cuda_library.unlink(missing_ok=True)
        now = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
        info["date"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        library.with_name("_build_info.json").write_text(json.dumps(info, indent=2) + "\n")

        if not info["cuda"] and wanted_cuda() == "1":
            raise SystemExit(f"levit-kernels: LEVIT_CUDA=1, but {info['cuda_reason']}")
        if not info["built"]:
            if os.environ.get("LEVIT_REQUIRE_NATIVE") == "1":
                raise SystemExit(f"levit-kernels: LEVIT_REQUIRE_NATIVE=1, but {info['reason']}")
            print(f"levit-kernels: WARNING: installed WITHOUT native kernels: {info['reason']}", file=sys.stderr)


def compile_library(compiler: list[str], extension: Extension, torch: Torch, library: Path) -> None:
    """Compiles the sources in parallel and links them; raises CalledProcessError with the compiler's words."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_source(numbered: tuple[int, str]) -> str:
            number, source = numbered
            output = os.path.join(folder, f"{number}.o")
            run([*compiler, *COMPILE_FLAGS, "-isystem", str(torch.root / "include"), "-c", source, "-o", output])
            return output

        objects = list(pool.map(compile_source, enumerate(extension.sources)))
        # The shim of the stable ABI is in libtorch_cpu, which every torch has and `import torch` has loaded by then.
        linked = f"{library}.new"  # a process that runs the older build keeps it
        run([*compiler, "-shared", *objects, "-o", linked, f"-L{torch.root / 'lib'}", "-ltorch_cpu"])
        os.replace(linked, library)


def run(command: list[str]) -> None:
    print(shlex.join(command))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="")
    done.check_returncode()


def describe(error: Exception) -> str:
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = (error.stdout or "").splitlines()
    first = next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {error.returncode}")
    return f"the compiler failed: {first.strip()}"


setup(
    ext_modules=[
        Extension(
            "levit_kernels._C",
            sources=["csrc/module.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))],
            depends=sorted([*glob.glob("csrc/**/*.h", recursive=True), *glob.glob("csrc/cuda/*")]),
            py_limited_api=True,
            optional=True,  # setuptools then does not look for a library that could not be built
        )
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
