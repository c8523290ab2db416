"""Peak memory of temporaries, measured in a process of its own by the kernel's high-water mark (Linux)."""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def peak_temporaries(target: str, threads: int = 1, timeout: float = 300.0, **arguments: Any) -> int:
    """Bytes that one call needs above what was resident before it.

    `target` is "module:function"; the function gets `arguments` (JSON types) and returns `(warm_up, work)`. It builds
    whatever is not to be counted (weights, inputs); `warm_up()` is called once, so that thread pools and derived
    weights exist, then `work()` is measured. Raises `RuntimeError` with the child's message if anything fails.
    """
    order = json.dumps({"target": target, "threads": threads, "arguments": arguments})
    child = subprocess.run(
        [sys.executable, "-m", "bench.memory", order], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"peak memory of {target}: {last}")
    return int(child.stdout.strip().splitlines()[-1])


def _measure(prepare: Callable[..., tuple[Callable[[], Any], Callable[[], Any]]], arguments: dict[str, Any]) -> int:
    warm_up, work = prepare(**arguments)
    warm_up()
    # What the allocator keeps from the warm-up would be used again unseen: hand it back first.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to the present size
    before = _status_bytes("VmRSS")
    work()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    """The child process: read the order from the command line, print the bytes."""
    order = json.loads(sys.argv[1])
    module, function = order["target"].split(":")
    prepare = getattr(importlib.import_module(module), function)
    import torch  # after the target: a wrong one is told at once

    torch.set_num_threads(order["threads"])
    print(_measure(prepare, order["arguments"]))


if __name__ == "__main__":
    main()
