"""Gates of equations 7-8: `[K]`, `[K,H]`, or per image `[B,K,1]`, `[B,K,H]`.

A gate of exactly zero drops its expert, whatever that expert computes: NaN or Inf of an expert that an image does not
use never reach that image. Routed inference relies on it (experts younger than k* are not even evaluated).
"""

from __future__ import annotations

import torch

from ._check import Shapes, at_least_float32


def check_gates(shapes: Shapes, gates: torch.Tensor) -> None:
    """Raises unless the gates fit the K, H and B that the other arguments have bound."""
    if gates.ndim == 3:
        # letter "1" would not let H = 1 be told from one gate per expert, and need not: both mean the same
        shapes.match("gates", gates, "B K 1" if gates.shape[2] == 1 else "B K H", same_dtype=False)
    elif gates.ndim in (1, 2):
        shapes.match("gates", gates, "K" if gates.ndim == 1 else "K H", same_dtype=False)
    else:
        raise ValueError(
            f"{shapes.op}: gates must have shape [K], [K, H], [B, K, 1] or [B, K, H], got {list(gates.shape)}"
        )


def expand(gates: torch.Tensor) -> torch.Tensor:
    """Any gate layout -> [B or 1, K, H or 1] (a view)."""
    if gates.ndim == 1:
        return gates[None, :, None]
    return gates[None] if gates.ndim == 2 else gates


def broadcast_strides(expanded: torch.Tensor) -> tuple[int, ...]:
    """Strides of what `expand` returns, 0 where one image's or one head's gate serves all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(expanded.shape, expanded.stride(), strict=True))


def reduce_like(per_image: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Gradients [B,K,H], or [B,K,H,N] still to be summed over N, -> the layout and dtype of `gates`: the transpose of
    `expand` followed by broadcasting.
    """
    over = [0] if gates.ndim < 3 else []
    if gates.ndim == 1 or (gates.ndim == 3 and gates.shape[2] == 1):
        over.append(2)
    if per_image.ndim == 4:
        over.append(3)
    if not over:
        return per_image.to(gates.dtype, copy=True)
    return per_image.sum(over).to(gates.dtype).view(gates.shape)


def gated_sum(outputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Equation 8 for reference use: outputs [B,K,N,E], gates in any layout -> [B,N,E], E = H*d head by head."""
    dtype = torch.promote_types(outputs.dtype, gates.dtype)
    gates = expand(gates).to(at_least_float32(dtype)).expand(len(outputs), -1, -1)
    heads = outputs.to(gates.dtype).unflatten(3, (gates.shape[2], -1))
    heads = torch.where(gates[:, :, None, :, None] == 0, heads.nan_to_num(), heads)
    return torch.einsum("bknhd,bkh->bnhd", heads, gates).flatten(2).to(dtype)
