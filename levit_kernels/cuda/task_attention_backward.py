"""Gradients of task_attention: a kernel recomputes attention and writes it and the gradients of the scores.

What remains are matrix products: composed/task_tokens_backward.py.
"""

from __future__ import annotations

import torch

from ..composed.task_tokens_backward import backward
from .task_attention import Tokens, refuse

__all__ = ["refuse", "task_attention_backward"]


def task_attention_backward(
    grad: torch.Tensor,
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of the tensor arguments that `needs` names, in their order; nothing was saved, all is recomputed."""
    asked = Tokens.of(patches, tokens, wq, wk, wv, num_heads, scale)
    return backward(asked, grad, tokens, patches, wq, wo, bo, needs)
