"""The variational autoencoder of an expert: what routing and the expansion rule listen to (SPEC.md, VAE)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levit.config import LEViTConfig

NEGATIVE_SLOPE = 0.2
"""Slope of every LeakyReLU below zero [C]."""

LOG_SIGMA_RANGE = (-8.0, 4.0)
"""log σ is clamped to this range, so that neither σ nor the loss can overflow [D]."""


def build_vae(cfg: LEViTConfig) -> VAE:
    """The VAE that the configuration asks for."""
    return MLPVAE(cfg) if cfg.vae == "mlp" else ConvVAE(cfg)


class VAE(nn.Module):
    """What every VAE has in common: codes N(μ, σ²), and a loss per image. Subclasses encode and decode."""

    beta: float

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, S, S] → the code's mean μ and log standard deviation, [B, L] each."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [..., L] → reconstructed pixels [..., F]."""
        raise NotImplementedError

    def target(self, images: Tensor) -> Tensor:
        """The pixels that a reconstruction is compared with: [B, C, S, S] → [B, F]."""
        return images.flatten(1)

    def loss(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """VAE loss per image: Σ_pixels (x̂ − x)² + β·KL(q ‖ N(0, I)) [P].

        Args:
            images: [B, C, S, S].
            noise: ε of the codes μ + σε: [B, L] one draw per image, or [S, 1, L] the same S draws for every image,
                over which the loss is averaged; None takes the mean code.

        Returns:
            [B].
        """
        return vae_loss(self.encode(images), self.decode, self.target(images), noise, self.beta)

    def reconstruction_error(self, images: Tensor) -> Tensor:
        """Σ_pixels (x̂ − x)² at the mean code, [B, C, S, S] → [B]: what rule `energy` looks at."""
        return (self.decode(self.encode(images)[0]) - self.target(images)).square().sum(-1)


class MLPVAE(VAE):
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
        hidden = images.flatten(1)
        for layer in self.encoder:
            hidden = torch.tanh(layer(hidden))
        return self.mu(hidden), self.log_sigma(hidden).clamp(*LOG_SIGMA_RANGE)

    def decode(self, codes: Tensor) -> Tensor:
        to_first, to_second, to_pixels = self.decoder
        return to_pixels(F.relu(to_second(torch.tanh(to_first(codes)))))


class ConvVAE(VAE):
    """Convolutions over 32×32 images; other sizes are resized, for the VAE only [D].

    Four 3×3 stride-2 convolutions 64-128-256-512, flattened 2048 → 1024 → (μ, log σ); L → 512·2·2, then transposed
    4×4 stride-2 convolutions 512-256-128-C; LeakyReLU between, linear out [P, strides D].
    """

    SIDE = 32
    CHANNELS = (64, 128, 256, 512)

    def __init__(self, cfg: LEViTConfig) -> None:
        super().__init__()
        self.beta = cfg.beta
        widths = (cfg.channels, *self.CHANNELS)
        deepest = self.CHANNELS[-1]
        self.encoder = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.hidden = nn.Linear(deepest * 2 * 2, 1024)
        self.mu = nn.Linear(1024, cfg.latent_dim)
        self.log_sigma = nn.Linear(1024, cfg.latent_dim)
        self.from_code = nn.Linear(cfg.latent_dim, deepest * 2 * 2)
        widths = (deepest, 512, 256, 128, cfg.channels)
        self.decoder = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 4, stride=2, padding=1) for a, b in zip(widths, widths[1:], strict=False)
        )

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = self.resized(images)
        for layer in self.encoder:
            pixels = F.leaky_relu(layer(pixels), NEGATIVE_SLOPE)
        return self.code(pixels)

    def code(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What the last convolution gives, [B, 512, 2, 2] → μ and log σ, [B, L] each."""
        hidden = F.leaky_relu(self.hidden(pixels.flatten(1)), NEGATIVE_SLOPE)
        return self.mu(hidden), self.log_sigma(hidden).clamp(*LOG_SIGMA_RANGE)

    def first_pixels(self, codes: Tensor) -> Tensor:
        """Codes [R, L] → what the first transposed convolution takes, [R, 512, 2, 2]."""
        return F.leaky_relu(self.from_code(codes), NEGATIVE_SLOPE).unflatten(1, (-1, 2, 2))

    def decode(self, codes: Tensor) -> Tensor:
        pixels = self.first_pixels(codes.flatten(0, -2))
        for layer in self.decoder[:-1]:
            pixels = F.leaky_relu(layer(pixels), NEGATIVE_SLOPE)
        return self.decoder[-1](pixels).flatten(1).unflatten(0, codes.shape[:-1])

    def target(self, images: Tensor) -> Tensor:
        return self.resized(images).flatten(1)

    def resized(self, images: Tensor) -> Tensor:
        """[B, C, S, S] → [B, C, 32, 32]."""
        if images.shape[-1] == self.SIDE:
            return images
        return F.interpolate(images, (self.SIDE, self.SIDE), mode="bilinear", align_corners=False)


def vae_loss(
    code: tuple[Tensor, Tensor],
    decode: Callable[[Tensor], Tensor],
    target: Tensor,
    noise: Tensor | None,
    beta: float,
) -> Tensor:
    """See `VAE.loss`: of the code's μ and log σ [B, L], pixels [B, F] and ε."""
    mu, log_sigma = code
    codes = mu if noise is None else mu + log_sigma.exp() * noise
    error = (decode(codes) - target).square().sum(-1)
    if error.dim() == 2:
        error = error.mean(0)
    return error + beta * kl_divergence(mu, log_sigma)


def kl_divergence(mu: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, I)) per row: [B, L] and [B, L] → [B]."""
    return 0.5 * (mu.square() + (2 * log_sigma).exp() - 1 - 2 * log_sigma).sum(-1)
