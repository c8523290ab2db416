"""What a build finds around it: torch, a C++ compiler, nvcc. Imports neither torch nor setuptools."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

TORCH_MINIMUM = (2, 10)  # the first with torch_parallel_for in its stable ABI
CXX_STANDARD = "-std=c++20"  # what the headers of torch 2.14 are written for


@dataclass(frozen=True)
class Torch:
    root: Path
    version: str
    cuda: str | None  # the CUDA version it was built with

    @property
    def new_enough(self) -> bool:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2]) >= TORCH_MINIMUM


@dataclass(frozen=True)
class Compiler:
    command: str
    version: str


def find_torch() -> Torch | None:
    """The torch of the build environment, else of the environment installed into; never imports it (seconds)."""
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec is not None else _ask_target_environment()
    if not origin:
        return None
    root = Path(origin).parent
    if not (root / "version.py").exists():  # the remains of an interrupted installation
        return None
    facts = runpy.run_path(str(root / "version.py"))
    return Torch(root, str(facts["__version__"]), facts.get("cuda"))


def _ask_target_environment() -> str:
    # pip isolates a build through PYTHONPATH alone: the same interpreter without it (-E) is the target environment,
    # with its user site, system site and .pth files.
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin or '' if s else '')"
    elsewhere = os.path.dirname(sys.executable)  # -c puts the current folder first on the path
    run = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, cwd=elsewhere)
    return run.stdout.strip()


def find_compiler() -> Compiler:
    """The first C++ compiler that compiles and links; $CXX alone if it is set.

    Raises LookupError saying which were tried and how each failed.
    """
    chosen = os.environ.get("CXX")
    if chosen:
        candidates = [chosen]
    else:
        configured = sysconfig.get_config_var("CXX") or ""  # the one that built this Python; often not on this machine
        candidates = list(dict.fromkeys(filter(None, [configured, "c++", "g++", "clang++"])))
    failures = []
    for command in candidates:
        failure = _try_compiler(shlex.split(command))
        if failure is None:
            return Compiler(command, _first_line([*shlex.split(command), "--version"]))
        failures.append(f"{command}: {failure}")
    raise LookupError("no working C++ compiler (" + "; ".join(failures) + ")")


def _try_compiler(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return "not found"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <vector>\nint probe() { return static_cast<int>(std::vector<int>(3).size()); }\n")
        output = str(Path(folder, "probe.so"))
        run = subprocess.run(
            [*command, CXX_STANDARD, "-fPIC", "-shared", str(source), "-o", output], capture_output=True, text=True
        )
    if run.returncode == 0:
        return None
    lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


def find_nvcc(cuda: str | None) -> tuple[Path | None, str]:
    """(CUDA home, what was found) of an nvcc that fits a torch built with that CUDA version; (None, why not)."""
    if cuda is None:
        return None, "this torch is a build without CUDA"
    for home in _cuda_homes():
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime_api.h").exists():
            release = re.search(r"release (\d+\.\d+)", _output([str(home / "bin" / "nvcc"), "--version"]))
            version = release.group(1) if release else "of unknown version"
            if version.split(".")[0] != cuda.split(".")[0]:
                return None, f"nvcc {version} in {home} does not match CUDA {cuda} of torch"
            return home, f"nvcc {version} in {home} matches CUDA {cuda} of torch"
    return None, "no nvcc with its headers in CUDA_HOME, CUDA_PATH, pip's nvidia folder, PATH or /usr/local/cuda"


def _cuda_homes() -> list[Path]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    for folder in dict.fromkeys([sysconfig.get_path("purelib"), *sys.path]):
        homes += glob.glob(os.path.join(folder, "nvidia", "cu[0-9]*"))
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))))
        # A wrapper script lies elsewhere; nvcc itself then says where it is.
        homes += re.findall(r"TOP=(.+)", _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]))
    homes.append("/usr/local/cuda")
    return [Path(home).resolve() for home in homes if home]


def _output(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return run.stdout + run.stderr


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "of unknown version")
