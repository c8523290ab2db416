"""expansion_distances from torch calls, tile by tile of experts x images: neither codes nor activations exist whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .._check import at_least_float32
from . import vae


def expansion_distances(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], query: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """See levit_kernels.expansion_distances."""
    total = images.new_zeros(len(encoder[0]), dtype=at_least_float32(images.dtype))
    for tile, samples in _tiles(images, encoder):
        acts = vae.encode(images[samples], encoder, tile, noise is not None)
        difference = _codes(acts, noise, tile, samples).to(total.dtype) - query[samples].to(total.dtype)
        total[tile] += torch.linalg.vector_norm(difference, dim=-1).sum(1)
    return total.div_(len(images))


def expansion_distances_backward(
    grad: torch.Tensor,
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    query: torch.Tensor,
    noise: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of images, encoder, query and noise, those that `needs` names; activations are recomputed."""
    totals = vae.new_totals([images, *encoder, query, noise], needs)
    by_images, *by_encoder, by_query, by_noise = totals
    for tile, samples in _tiles(images, encoder):
        acts = vae.encode(images[samples], encoder, tile, noise is not None)
        difference = _codes(acts, noise, tile, samples).to(grad.dtype) - query[samples].to(grad.dtype)
        distance = torch.linalg.vector_norm(difference, dim=-1, keepdim=True)
        weight = grad[tile, None, None] / len(images)
        by_codes = difference.mul_(weight / distance).masked_fill_(distance == 0, 0)
        if by_query is not None:
            by_query[samples] -= by_codes.sum(0)
        by_logsigma = None
        if noise is not None:
            by_sigma = by_codes * acts.logsigma().to(grad.dtype).exp()
            if by_noise is not None:
                by_noise[tile, samples] = by_sigma
            by_logsigma = (by_sigma * noise[tile, samples]).to(images.dtype)
        if any(needs[:-2]):
            by_mu = by_codes.to(images.dtype)
            part = vae.encode_backward(
                by_mu, by_logsigma, images[samples], acts, encoder, by_encoder, tile, by_images is not None
            )
            if by_images is not None:
                by_images[samples] += part
    return [x.to(images.dtype) for x in totals if x is not None]


def _codes(acts: vae.Encoded, noise: torch.Tensor | None, tile: slice, samples: slice) -> torch.Tensor:
    return acts.mu if noise is None else acts.mu + acts.logsigma().exp() * noise[tile, samples]


def _tiles(images: torch.Tensor, encoder: Sequence[torch.Tensor]) -> Iterator[tuple[slice, slice]]:
    numbers = encoder[0].shape[2] + encoder[2].shape[2] + 4 * encoder[4].shape[2]
    return vae.tiles(len(encoder[0]), len(images), numbers, images.dtype, images.device.type)
