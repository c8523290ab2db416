"""vae_codes from torch calls: batched products over all experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._vae import LOGSIGMA_MAX, LOGSIGMA_MIN


def vae_codes(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """See levit_kernels.vae_codes."""
    w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma = encoder
    hidden = torch.tanh(images @ w1 + b1[:, None])
    hidden = torch.baddbmm(b2[:, None], hidden, w2).tanh_()
    sigma = torch.baddbmm(b_logsigma[:, None], hidden, w_logsigma).clamp_(LOGSIGMA_MIN, LOGSIGMA_MAX).exp_()
    return torch.baddbmm(b_mu[:, None], hidden, w_mu).addcmul_(sigma, noise)
