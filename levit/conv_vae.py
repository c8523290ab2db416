"""The convolutional VAE with channels last, through the kernels; weights and numbers are those of `ConvVAE`."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from levit.vae import NEGATIVE_SLOPE, ConvVAE, vae_loss
from levit_kernels.strided_conv import strided_conv, transposed_conv


def conv_vae_loss(vae: ConvVAE, images: Tensor, noise: Tensor | None = None) -> Tensor:
    """`ConvVAE.loss`: [B, C, S, S] → [B]."""
    pixels = vae.resized(images).permute(0, 2, 3, 1).contiguous()
    hidden = pixels
    for layer in vae.encoder:
        hidden = F.leaky_relu(strided_conv(hidden, layer.weight, layer.bias), NEGATIVE_SLOPE)
    code = vae.code(hidden.permute(0, 3, 1, 2))
    return vae_loss(code, partial(_decode, vae), pixels.flatten(1), noise, vae.beta)


def _decode(vae: ConvVAE, codes: Tensor) -> Tensor:
    """Codes [..., L] → reconstructed pixels [..., F], flattened H, W, C."""
    pixels = vae.first_pixels(codes.flatten(0, -2)).permute(0, 2, 3, 1)
    for layer in vae.decoder[:-1]:
        pixels = F.leaky_relu(transposed_conv(pixels, layer.weight, layer.bias), NEGATIVE_SLOPE)
    last = vae.decoder[-1]
    return transposed_conv(pixels, last.weight, last.bias).flatten(1).unflatten(0, codes.shape[:-1])
