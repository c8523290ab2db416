"""The CUDA C++ kernels (csrc/cuda, levit_kernels/cuda) as a backend: NVIDIA GPUs from sm_80 on.

Unless they are forced (`use_backend("cuda")`, LEVIT_KERNELS_BACKEND=cuda), gpu_choice.py leaves calls to Triton that
are no better off here. They have been run and race-checked in an emulator and compiled for sm_80 and sm_90, but no GPU
has timed them yet.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..cuda.runtime import TYPES, current, substituted
from ..cuda.support import no_code, no_gpu
from . import triton as triton_backend
from .gpu_choice import prefers_cuda
from .registry import Backend, device_of, forced

_FUNCTIONS = {
    "expert_attention": ("expert_attention", "expert_attention_backward"),
    "dkf_fuse": ("dkf_fuse", "dkf_fuse_backward"),
    "latent_distance": ("latent_distance", "latent_distance_backward"),
    "vae": ("elbo_loss", "elbo_loss_backward", "expansion_distances", "expansion_distances_backward"),
    "vae_codes": ("vae_codes",),
    "task_attention": ("task_attention",),
    "task_attention_backward": ("task_attention_backward",),
}
_MODULES = {op: module for module, ops in _FUNCTIONS.items() for op in ops}


def _module(op: str) -> Any:
    return importlib.import_module(f"levit_kernels.cuda.{_MODULES[op]}")


def _kernel(op: str) -> Callable[..., Any]:
    return lambda *args: getattr(_module(op), op)(*args)


OPS = {op: _kernel(op) for op in _MODULES}


def unavailable() -> str | None:
    """Why no CUDA kernel can run in this process, or None."""
    return None if substituted() else _unavailable()


@functools.cache
def _unavailable() -> str | None:
    try:
        return no_gpu(current().library)
    except RuntimeError as error:
        return str(error)


def serves(device: str) -> bool:
    """Whether tensors of this device type are for these kernels."""
    return unavailable() is None and current().serves(torch.device(device))


def refuse(op: str, args: tuple) -> str | None:
    """Why the CUDA kernels do not take a call."""
    device = device_of(args)
    if not current().serves(device):
        return f"the tensors are on {device}"
    if device.type == "cuda" and (reason := _cannot_run_on(device)):
        left_to = "Triton" if op in triton_backend.OPS and triton_backend.unavailable() is None else "plain torch"
        return f"{reason}; left to {left_to}"
    for x in tree_leaves(args):
        if not isinstance(x, torch.Tensor):
            continue
        if x.is_floating_point() and x.dtype not in TYPES:
            return f"takes float32, bfloat16 and float16, got {x.dtype}"
        if x.numel() >= 2**31 * max(1, len(x)):
            return f"takes fewer than 2**31 numbers per image and expert, got shape {list(x.shape)}"
    if (reason := _module(op).refuse(op, args)) is not None or forced() == "cuda":
        return reason
    preferred, reason = prefers_cuda(op, args, device)
    return None if preferred else reason


@functools.cache
def _cannot_run_on(device: torch.device) -> str | None:
    reason = no_code(torch.cuda.get_device_capability(device))
    return reason and f"{reason} ({torch.cuda.get_device_name(device)})"


def explain(op: str, args: tuple) -> str:
    """Why the CUDA kernels take a call that they do not refuse."""
    return "forced" if forced() == "cuda" else prefers_cuda(op, args, device_of(args))[1]


BACKEND = Backend("cuda", OPS, refuse, unavailable, serves, explain)
