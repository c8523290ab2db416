"""Whether the library of CUDA kernels runs with this driver and on a GPU; else why not, and what helps.

Nothing here initialises CUDA.
"""

from __future__ import annotations

import ctypes
import re

import torch

from .. import native

OLDEST = (8, 0)  # compute capability: cp.async, ldmatrix and bfloat16 matrix products


def no_gpu(library: ctypes.CDLL) -> str | None:
    """Why there is no GPU for the kernels, or None."""
    if torch.version.cuda is None:
        return f"torch sees no GPU: {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch sees no GPU: {_what_torch_says()}"
    driver, runtime = library.levit_driver_version(), library.levit_runtime_version()
    if driver // 1000 < runtime // 1000:  # minor versions serve each other
        return (
            f"the NVIDIA driver is for CUDA {_version(driver)}, older than the runtime of the kernels, "
            f"{_version(runtime)}: update the driver, or rebuild levit-kernels beside a torch for that CUDA"
        )
    return None


def no_code(capability: tuple[int, int]) -> str | None:
    """Why the library holds nothing that a GPU of this compute capability runs, or None."""
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < OLDEST:
        return f"needs sm_80 or newer, and this GPU is {name}"
    built = native.build_info().get("cuda_architectures")  # not in the records of older builds
    if not built or any(runs(code, capability) for code in built):
        return None
    return (
        f"has no code for {name}, which this GPU is, only {', '.join(built)}: reinstall levit-kernels with "
        f"TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]}"
    )


def runs(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU runs what was compiled as sm_80 (machine code: of its major version, no newer), compute_80 (PTX: no
    newer) or either with a letter (for one GPU, "a", or one major version, "f")."""
    kind, major, minor, letter = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code).groups()
    wanted = (int(major), int(minor))
    if letter == "a":
        return wanted == capability
    return wanted <= capability and (wanted[0] == capability[0] or (kind == "compute" and not letter))


def _what_torch_says() -> str:
    """Why it has no GPU: no driver, one that is too old, none visible."""
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError or AssertionError, by version
        return " ".join(str(error).split()).split(". ")[0]
    return "it names no reason"


def _version(number: int) -> str:
    """Of CUDA, as its functions give it: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
