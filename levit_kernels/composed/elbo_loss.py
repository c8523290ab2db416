"""elbo_loss from torch calls, tile by tile of experts x images: no reconstruction exists whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .._check import at_least_float32
from . import vae

Tensors = Sequence[torch.Tensor]


def elbo_loss(
    images: torch.Tensor, encoder: Tensors, decoder: Tensors, beta: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """See levit_kernels.elbo_loss."""
    dtype = at_least_float32(images.dtype)
    out = images.new_empty(len(images), len(encoder[0]), dtype=dtype)
    for tile, part in _tiles(images, encoder, decoder, noise):
        acts = vae.encode(images[part], encoder, tile, with_sigma=True)
        codes = _codes(acts, noise)
        error = _error(vae.decode(codes.flatten(1, 2), decoder, tile), images[part], codes.shape[1])
        mu, logsigma = acts.mu.to(dtype), acts.logsigma().to(dtype)
        kl = (mu.square() + (2 * logsigma).exp_() - 2 * logsigma - 1).sum(-1)
        out[part, tile] = (error.square_().sum(-1).mean(1) + 0.5 * beta * kl).t()
    return out


def elbo_loss_backward(
    grad: torch.Tensor,
    images: torch.Tensor,
    encoder: Tensors,
    decoder: Tensors,
    beta: float,
    noise: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of images, encoder, decoder and noise, those that `needs` names; activations are recomputed."""
    totals = vae.new_totals([images, *encoder, *decoder, noise], needs)
    by_images, by_noise = totals[0], totals[-1]
    by_encoder, by_decoder = totals[1 : 1 + len(encoder)], totals[1 + len(encoder) : -1]
    needs_encoder = by_images is not None or any(x is not None for x in by_encoder)
    for tile, part in _tiles(images, encoder, decoder, noise):
        weight = grad[part, tile].t()[:, :, None]  # [n,b,1]
        acts = vae.encode(images[part], encoder, tile, with_sigma=True)
        codes = _codes(acts, noise)  # [n,S,b,L]
        samples = codes.shape[1]
        decoded = vae.decode(codes.flatten(1, 2), decoder, tile)
        by_output = _error(decoded, images[part], samples).mul_(weight[:, None] * (2 / samples))
        if by_images is not None:
            by_images[part] -= by_output.sum((0, 1))
        by_codes = vae.decode_backward(
            by_output.to(images.dtype).flatten(1, 2),
            codes.flatten(1, 2),
            decoded,
            decoder,
            by_decoder,
            tile,
            needs_encoder or by_noise is not None,
        )
        if by_codes is None:
            continue
        by_codes = by_codes.view_as(codes).to(grad.dtype)
        logsigma = acts.logsigma().to(grad.dtype)
        sigma = logsigma.exp()
        if by_noise is not None:
            by_noise += (by_codes * sigma[:, None]).sum((0, 2))
        if not needs_encoder:
            continue
        by_mu = by_codes.sum(1) + beta * weight * acts.mu
        by_logsigma = beta * weight * (sigma.square() - 1)
        if noise is not None:
            by_logsigma += sigma * (by_codes * noise[:, None]).sum(1)
        by_part = vae.encode_backward(
            by_mu.to(images.dtype),
            by_logsigma.to(images.dtype),
            images[part],
            acts,
            encoder,
            by_encoder,
            tile,
            by_images is not None,
        )
        if by_images is not None:
            by_images[part] += by_part
    return [x.to(images.dtype) for x in totals if x is not None]


def _codes(acts: vae.Encoded, noise: torch.Tensor | None) -> torch.Tensor:
    """`[n,S,b,L]`, S = 1 for the mean code."""
    mu = acts.mu[:, None]
    return mu if noise is None else mu + acts.logsigma().exp()[:, None] * noise[:, None]


def _error(decoded: vae.Decoded, images: torch.Tensor, samples: int) -> torch.Tensor:
    """x' - x `[n,S,b,F]` in float32 at least; takes the output's memory where it can."""
    output = decoded.output.unflatten(1, (samples, -1))
    dtype = at_least_float32(images.dtype)
    return output.sub_(images) if output.dtype == dtype else output.to(dtype).sub_(images.to(dtype))


def _tiles(
    images: torch.Tensor, encoder: Tensors, decoder: Tensors, noise: torch.Tensor | None
) -> Iterator[tuple[slice, slice]]:
    samples = 1 if noise is None else len(noise)
    latent, inputs = encoder[4].shape[2], images.shape[1]
    numbers = encoder[0].shape[2] + encoder[2].shape[2] + 4 * latent
    numbers += samples * (latent + decoder[0].shape[2] + decoder[2].shape[2] + inputs)
    return vae.tiles(len(encoder[0]), len(images), numbers, images.dtype, images.device.type)
