"""latent_distance from torch calls, in slices of samples, so that the differences stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._check import at_least_float32

SLICE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def latent_distance(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """See levit_kernels.latent_distance."""
    total = codes.new_zeros(len(codes), dtype=at_least_float32(codes.dtype))
    for samples in _slices(codes):
        total += torch.linalg.vector_norm(_difference(codes, query, samples), dim=-1).sum(1)
    return total.div_(len(query))


def latent_distance_backward(
    grad: torch.Tensor, codes: torch.Tensor, query: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor]:
    """The unit vectors from query to codes, weighted by grad / M; zero where they coincide."""
    by_codes = codes.new_empty(codes.shape) if needs[0] else None
    by_query = query.new_empty(query.shape) if needs[1] else None
    weight = (grad / len(query))[:, None, None]
    for samples in _slices(codes):
        difference = _difference(codes, query, samples)
        distance = torch.linalg.vector_norm(difference, dim=-1, keepdim=True)
        direction = difference.mul_(weight / distance).masked_fill_(distance == 0, 0)
        if by_codes is not None:
            by_codes[:, samples] = direction
        if by_query is not None:
            by_query[samples] = direction.sum(0).neg_()
    return [x for x in (by_codes, by_query) if x is not None]


def _difference(codes: torch.Tensor, query: torch.Tensor, samples: slice) -> torch.Tensor:
    dtype = at_least_float32(codes.dtype)
    return codes[:, samples].to(dtype) - query[samples].to(dtype)


def _slices(codes: torch.Tensor) -> Iterator[slice]:
    experts, samples, depth = codes.shape
    row_bytes = experts * depth * at_least_float32(codes.dtype).itemsize
    step = max(1, SLICE_BYTES[codes.device.type] // row_bytes)
    for start in range(0, samples, step):
        yield slice(start, min(start + step, samples))
