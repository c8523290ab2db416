"""The MLP VAEs of SPEC.md, stacked over experts: the layout that expansion_distances and elbo_loss share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._check import Shapes

# hidden sizes: h1, h2 of the encoder, g1, g2 of the decoder; F inputs, L latent dimensions
ENCODER = {
    "w1": "K F h1",
    "b1": "K h1",
    "w2": "K h1 h2",
    "b2": "K h2",
    "w_mu": "K h2 L",
    "b_mu": "K L",
    "w_logsigma": "K h2 L",
    "b_logsigma": "K L",
}
DECODER = {"w1": "K L g1", "b1": "K g1", "w2": "K g1 g2", "b2": "K g2", "w3": "K g2 F", "b3": "K F"}
LOGSIGMA_MIN, LOGSIGMA_MAX = -8.0, 4.0  # [D]


def check_encoder(shapes: Shapes, encoder: Sequence[torch.Tensor]) -> None:
    """Raises unless the encoder is [w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma] of one K."""
    shapes.match_list("encoder", encoder, ENCODER)


def check_decoder(shapes: Shapes, decoder: Sequence[torch.Tensor]) -> None:
    """Raises unless the decoder is [w1, b1, w2, b2, w3, b3] of one K."""
    shapes.match_list("decoder", decoder, DECODER)


def encode(images: torch.Tensor, encoder: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """For reference use: images `[M,F]` -> mean code and clamped log sigma, each `[K,M,L]`."""
    w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma = encoder
    hidden = torch.tanh(images @ w1 + b1[:, None])
    hidden = torch.tanh(hidden @ w2 + b2[:, None])
    logsigma = hidden @ w_logsigma + b_logsigma[:, None]
    return hidden @ w_mu + b_mu[:, None], logsigma.clamp(LOGSIGMA_MIN, LOGSIGMA_MAX)


def decode(codes: torch.Tensor, decoder: Sequence[torch.Tensor]) -> torch.Tensor:
    """For reference use: codes `[K,R,L]` -> reconstructions `[K,R,F]`."""
    w1, b1, w2, b2, w3, b3 = decoder
    hidden = torch.tanh(codes @ w1 + b1[:, None])
    hidden = torch.relu(hidden @ w2 + b2[:, None])
    return hidden @ w3 + b3[:, None]
