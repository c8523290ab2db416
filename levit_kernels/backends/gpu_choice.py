"""CUDA C++ or Triton where a GPU could run a call on either: by measurement, else by what padding wastes."""

from __future__ import annotations

import functools

import torch

from . import triton as triton_backend

MEASURED: dict[str, dict[str, str]] = {}
"""Name of a GPU -> {"op, dtype": "cuda" or "triton", whichever was faster}, from a report of `python -m bench.gpu` in
bench/results. None is committed: no GPU has timed the CUDA kernels yet."""


def prefers_cuda(op: str, args: tuple, device: torch.device) -> tuple[bool, str]:
    """(whether the CUDA kernels take a call that they could take, why)"""
    against_triton = triton_backend.BACKEND.reason_against(op, args)
    if against_triton is not None:
        return True, f"Triton does not: {against_triton}"
    name, dtype = gpu_name(device), str(_dtype(args)).removeprefix("torch.")
    faster = MEASURED.get(name, {}).get(f"{op}, {dtype}")
    if faster is not None:
        return faster == "cuda", f"{'CUDA' if faster == 'cuda' else 'Triton'} was faster on {name}"
    if op == "expert_attention":
        ours, tritons = _useful_shares(args[0].shape, args[3].shape, args[0].dtype, device)
        if ours is not None:
            return ours > tritons, f"of its arithmetic {ours:.0%} are useful, of Triton's {tritons:.0%}"
    return False, "left to Triton: neither measured nor on tensor cores, where padding would decide"


def gpu_name(device: torch.device) -> str:
    """As MEASURED has it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _dtype(args: tuple) -> torch.dtype:
    return next(x.dtype for x in args if isinstance(x, torch.Tensor))


@functools.lru_cache(maxsize=256)
def _useful_shares(
    patches: torch.Size, w_qkv: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[float | None, float]:
    """Of the CUDA kernel on tensor cores, if it runs there, and of Triton's; they depend on nothing but sizes."""
    from ..cuda import expert_attention as ours
    from ..triton import expert_attention as tritons

    like = [torch.empty(shape, dtype=dtype, device="meta") for shape in (patches, w_qkv)]
    return ours.useful_share(*like, device), tritons.useful_share(*like)
