"""The Triton kernels (levit_kernels/triton) as a backend: CUDA and ROCm tensors, or any in Triton's interpreter.

Neither Triton nor a kernel is imported before a call asks for one.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .registry import Backend, device_of

OLDEST = (3, 6)  # that of torch 2.10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _kernel(module: str, function: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(f"levit_kernels.triton.{module}"), function)(*args)

    return run


_FUNCTIONS = {
    "expert_attention": ("expert_attention",),
    "expert_attention_backward": ("expert_attention_backward",),
    "dkf_fuse": ("dkf_fuse", "dkf_fuse_backward"),
    "latent_distance": ("latent_distance", "latent_distance_backward"),
    "elbo_loss": ("elbo_loss", "elbo_loss_backward"),
    "vae_codes": ("vae_codes",),
    "vae_training_loss": ("vae_training_loss",),
    "head_training_loss": ("head_training_loss",),
    "position_noise": ("position_noise",),
    "batch_norm_fold": ("batch_norm_fold", "batch_norm_fold_backward"),
    "task_attention": ("task_attention",),
    "task_attention_backward": ("task_attention_backward",),
    "expansion_distances": ("expansion_distances", "expansion_distances_backward"),
}
OPS = {name: _kernel(module, name) for module, names in _FUNCTIONS.items() for name in names}


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which takes CPU tensors too."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def unavailable() -> str | None:
    """Why no Triton kernel can run in this process, or None."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}): `pip install triton`"
    if tuple(int(x) for x in triton.__version__.split(".")[:2]) < OLDEST:
        return f"Triton {triton.__version__} is too old: {'.'.join(map(str, OLDEST))} or newer is needed"
    if interpreting():
        return None
    if not torch.cuda.is_available():
        return "torch sees no GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # whatever a driver may raise; a driver that works does not
        return (
            f"Triton {triton.__version__} has no usable driver: {' '.join(str(error).split()) or type(error).__name__}"
        )
    return None


def serves(device: str) -> bool:
    """Whether tensors of this device type are for Triton."""
    return device == "cuda" or interpreting()


def refuse(op: str, args: tuple) -> str | None:
    """Why the Triton kernels do not take a call."""
    if not serves(device_of(args).type):
        return f"the tensors are on {device_of(args)}"
    for x in tree_leaves(args):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype not in DTYPES:
            return f"takes float32, bfloat16 and float16, got {x.dtype}"
    too_large = importlib.import_module(f"levit_kernels.triton.{op.removesuffix('_backward')}").too_large
    return too_large(op, args)


BACKEND = Backend("triton", OPS, refuse, unavailable, serves)
