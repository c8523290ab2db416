"""x @ w + b on the faster of torch's two CPU libraries.

On some CPUs (AMD) MKL's GEMM stays far below the FMA peak while oneDNN reaches it; on all, oneDNN's call costs some
10 us more. So large float32 and bfloat16 products go through oneDNN, all others through addmm.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

ONEDNN_FLOPS = 8e6  # below this the dearer call outweighs the faster product


@functools.cache
def _onednn_takes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def _onednn_wins(x: torch.Tensor, w: torch.Tensor) -> bool:
    flops = 2 * x.shape[0] * w.shape[0] * w.shape[1]
    return flops >= ONEDNN_FLOPS and x.device.type == "cpu" and torch.backends.mkldnn.enabled and _onednn_takes(x.dtype)


def matmul(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """x `[R,I]`, w `[I,O]`, b `[O]` -> `[R,O]`; w may be any view."""
    if _onednn_wins(x, w):
        return torch.ops.mkldnn._linear_pointwise(x, w.t(), b, "none", [], "")
    return torch.mm(x, w) if b is None else torch.addmm(b, x, w)


def matmul_leaky_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, negative_slope: float) -> torch.Tensor:
    """LeakyReLU(x @ w + b) with the activation in the product's epilogue where there is one."""
    if _onednn_wins(x, w):
        return torch.ops.mkldnn._linear_pointwise(x, w.t(), b, "leaky_relu", [negative_slope], "")
    return F.leaky_relu_(torch.addmm(b, x, w), negative_slope)
