"""The native library: loads it when an op first asks for it, and says why when it cannot.

Importing this module neither builds, loads nor initialises anything. `load` registers the ops of csrc/module.cpp as
`torch.ops.levit_native.*`.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

_LIBRARY = Path(__file__).with_name("_C.abi3.so")
_RECORD = Path(__file__).with_name("_build_info.json")
_REINSTALL = "reinstall levit-kernels (in a checkout: `pip install -v -e .`, which also shows the build)"

_lock = threading.Lock()
_loaded = False
_failure: str | None = None


def load() -> None:
    """Loads the native library once per process.

    Raises:
        RuntimeError: it was not built or does not load; names the reason and the remedy. The first failure is
            remembered and told again at every further call, so that a process never changes backend halfway.
    """
    global _loaded, _failure
    with _lock:
        if not _loaded and _failure is None:
            _failure = _load_library()
            _loaded = _failure is None
    if _failure is not None:
        raise RuntimeError(_failure)


def available() -> tuple[bool, str]:
    """(True, what was loaded) or (False, the reason and the remedy). Loads the library to find out."""
    try:
        load()
    except RuntimeError as error:
        return False, str(error)
    info = build_info()
    return True, f"native kernels built by {info['compiler']} for torch >= 2.10 (headers of {info['torch']})"


def build_info() -> dict[str, Any]:
    """What setup.py recorded: built, reason, compiler, flags, torch, cuda, cuda_architectures,
    cuda_reason, date.

    Without a record (a checkout that was never installed) only `built` and `reason` are there.
    """
    try:
        return json.loads(_RECORD.read_text())
    except (OSError, ValueError) as error:
        return {"built": False, "reason": f"levit-kernels has no readable build record ({error})"}


def _load_library() -> str | None:
    """None, or why the library is not loaded and what helps."""
    info = build_info()
    if not info["built"]:
        return f"levit-kernels has no native kernels: {info['reason']}. Mend that, then {_REINSTALL}."
    if not _LIBRARY.exists():
        return f"levit-kernels has no native kernels: {_LIBRARY} was built and is gone; {_REINSTALL}."
    import torch

    try:
        torch.ops.load_library(_LIBRARY)
    except (OSError, RuntimeError) as error:
        return (
            f"the native kernels of levit-kernels, built with the headers of torch {info['torch']}, do not load into "
            f"torch {torch.__version__}: {error}. They need torch >= 2.10; {_REINSTALL}."
        )
    return None
