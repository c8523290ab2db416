"""Builds levit_kernels/_cuda.so, the CUDA kernels behind a plain C interface, with nvcc. Imports neither torch nor
setuptools."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environment import CXX_STANDARD, Torch, find_nvcc

DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"
OLDEST = (8, 0)
BYTES_PER_JOB = 2 << 30  # what nvcc takes at most for one of the sources

Runner = Callable[[list[str]], None]


def build_cuda(sources: Sequence[str], torch: Torch | None, library: Path, run: Runner) -> tuple[list[str], str]:
    """Builds the library -> the codes in it (see `codes`), and how. `run` raises CalledProcessError where one fails.

    Raises LookupError saying why not: LEVIT_CUDA=0, no nvcc that fits torch, no architecture that nvcc knows.
    """
    wanted = wanted_cuda()
    if wanted == "0":
        raise LookupError("LEVIT_CUDA=0")
    home, found = find_nvcc(torch.cuda if torch else None)
    if home is None:
        raise LookupError(found)
    nvcc = str(home / "bin" / "nvcc")
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES
    chosen = architectures(asked, _known_to(nvcc))
    command = [nvcc, CXX_STANDARD, "-O3", "-Xcompiler=-fPIC", "--cudart=static", *_generate(chosen)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs()) as pool:

        def compile_source(numbered: tuple[int, str]) -> str:
            number, source = numbered
            output = os.path.join(folder, f"{number}.o")
            run([*command, "-c", source, "-o", output])
            return output

        objects = list(pool.map(compile_source, enumerate(sources)))
        linked = f"{library}.new"  # a process that runs the older build keeps it
        run([*command, "-shared", *objects, "-o", linked])
        os.replace(linked, library)
    return codes(chosen), f"built for {', '.join('sm_' + name for name, _ in chosen)}; {found}"


def wanted_cuda() -> str:
    """LEVIT_CUDA: "0" never, "1" or fail, "auto" (the default) where it can be built."""
    wanted = os.environ.get("LEVIT_CUDA") or "auto"
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"levit-kernels: LEVIT_CUDA must be 0, 1 or auto, got {wanted!r}")
    return wanted


def architectures(asked: str, known: Sequence[str]) -> list[tuple[str, bool]]:
    """-> (number, with PTX) of every architecture in a list like "8.0;9.0+PTX" that the kernels and nvcc can do; the
    last one comes with PTX, for GPUs that are newer. Raises LookupError if none is left."""
    chosen = []
    for part in re.split(r"[;, ]+", asked.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", part)
        if match is None:
            raise LookupError(f"TORCH_CUDA_ARCH_LIST has {part!r}, which is no number like 8.0 or 9.0+PTX")
        major, minor, variant, ptx = match.groups()
        if (int(major), int(minor)) >= OLDEST and major + minor in known:
            chosen.append((major + minor + variant, ptx is not None))
    if not chosen:
        raise LookupError(f"of the architectures {asked} none is sm_80 or newer and known to nvcc")
    name, _ = chosen[-1]
    return [*chosen[:-1], (name, True)]


def codes(chosen: Sequence[tuple[str, bool]]) -> list[str]:
    """What the library holds: machine code as "sm_80", PTX as "compute_90"."""
    return [f"sm_{name}" for name, _ in chosen] + [f"compute_{name}" for name, ptx in chosen if ptx]


def jobs() -> int:
    """MAX_JOBS, else as many as cores and memory allow."""
    limit = os.environ.get("MAX_JOBS", "")
    if limit.isdigit() and int(limit):
        return int(limit)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // BYTES_PER_JOB))


def _known_to(nvcc: str) -> list[str]:
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    return re.findall(r"compute_(\d+)", listed)


def _generate(chosen: Sequence[tuple[str, bool]]) -> list[str]:
    flags = []
    for name, ptx in chosen:
        code = f"[sm_{name},compute_{name}]" if ptx else f"sm_{name}"
        flags.append(f"-gencode=arch=compute_{name},code={code}")
    return flags
