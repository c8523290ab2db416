"""The variational autoencoder of an expert: what routing and the expansion rule listen to (SPEC.md, VAE)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levit.config import LEViTConfig

LOG_SIGMA_RANGE = (-8.0, 4.0)
"""log σ is clamped to this range, so that neither σ nor the loss can overflow [D]."""


class MLPVAE(nn.Module):
    """F → h1 tanh → h2 tanh → (μ, log σ); L → h1 tanh → h2 ReLU → F linear, over images flattened C, H, W [C]."""

    def __init__(self, cfg: LEViTConfig) -> None:
        super().__init__()
        pixels = cfg.channels * cfg.image_size**2
        first, second = cfg.vae_hidden
        self.beta = cfg.beta
        self.encoder = nn.ModuleList([nn.Linear(pixels, first), nn.Linear(first, second)])
        self.mu = nn.Linear(second, cfg.latent_dim)
        self.log_sigma = nn.Linear(second, cfg.latent_dim)
        self.decoder = nn.ModuleList(
            [nn.Linear(cfg.latent_dim, first), nn.Linear(first, second), nn.Linear(second, pixels)]
        )

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, S, S] → the code's mean μ and log standard deviation, [B, L] each."""
        hidden = images.flatten(1)
        for layer in self.encoder:
            hidden = torch.tanh(layer(hidden))
        return self.mu(hidden), self.log_sigma(hidden).clamp(*LOG_SIGMA_RANGE)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [..., L] → reconstructed pixels [..., F]."""
        to_first, to_second, to_pixels = self.decoder
        return to_pixels(F.relu(to_second(torch.tanh(to_first(codes)))))

    def loss(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """VAE loss per image: Σ_pixels (x̂ − x)² + β·KL(q ‖ N(0, I)) [P].

        Args:
            images: [B, C, S, S].
            noise: ε of the codes μ + σε: [B, L] one draw per image, or [S, 1, L] the same S draws for every image,
                over which the loss is averaged; None takes the mean code.

        Returns:
            [B].
        """
        mu, log_sigma = self.encode(images)
        codes = mu if noise is None else mu + log_sigma.exp() * noise
        error = (self.decode(codes) - images.flatten(1)).square().sum(-1)
        if error.dim() == 2:
            error = error.mean(0)
        return error + self.beta * kl_divergence(mu, log_sigma)


def kl_divergence(mu: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, I)) per row: [B, L] and [B, L] → [B]."""
    return 0.5 * (mu.square() + (2 * log_sigma).exp() - 1 - 2 * log_sigma).sum(-1)
