"""dkf_fuse from torch calls that never gather the store whole.

One weight per expert: a matrix-vector product per image, straight from the store's row. One weight per head:
`embedding_bag` over rows of d numbers, which gathers and weighs in one call. Few experts, or a GPU: products over
slices of gathered images.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import gates as gating
from .._check import at_least_float32

MIN_GEMV_EXPERTS = 4  # with fewer, the call per image costs more than the read
BAG_INDICES = 1 << 16  # bounds the index tensors of a bag
GATHER_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}


def dkf_fuse(features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """See levit_kernels.dkf_fuse."""
    _, experts, length, width = features.shape
    dtype = torch.promote_types(features.dtype, gates.dtype)
    weights = gating.expand(gates).to(at_least_float32(dtype))
    batch = len(features) if index is None else len(index)
    out = features.new_empty(batch, length, width, dtype=weights.dtype)
    clean = features.is_cpu and bool((weights != 0).all())
    if not features.is_cpu or experts < MIN_GEMV_EXPERTS:
        for images, stored in _gathered(features, index, batch, weights.dtype):
            part = (weights if len(weights) == 1 else weights[images]).expand(len(stored), -1, -1)
            if clean and part.shape[2] == 1:
                out[images] = torch.bmm(part.transpose(1, 2), stored.flatten(2)).view(-1, length, width)
            else:
                out[images] = gating.gated_sum(stored, part)
    elif weights.shape[2] > 1:
        for images, bags in _bags(features, index, weights):
            out[images] = bags.weighted_sum(clean).view(-1, length, width)
    else:
        _fuse_images(out.flatten(1), features, weights[:, :, 0], index, clean)
    return out.to(dtype)


def _fuse_images(
    out: torch.Tensor, features: torch.Tensor, weights: torch.Tensor, index: torch.Tensor | None, clean: bool
) -> None:
    """out `[B,N*E]` = weights `[B or 1, K]` times the row of each image, without the experts whose weight is zero."""
    kept = None if clean else [_kept(weight) for weight in weights]
    for b, stored in enumerate(_rows(features, index)):
        w = b if len(weights) > 1 else 0
        weight = weights[w]
        if kept is not None:
            weight, stored = weight[kept[w]], stored[kept[w]]
        torch.mv(stored.flatten(1).to(out.dtype).t(), weight, out=out[b])


def _kept(weight: torch.Tensor) -> slice | list[int]:
    """The experts in use: a slice, which copies nothing, where they are the first ones, as in routed inference."""
    kept = [k for k, w in enumerate(weight.tolist()) if w != 0]
    return slice(0, len(kept)) if kept == list(range(len(kept))) else kept


def dkf_fuse_backward(
    grad: torch.Tensor,
    features: torch.Tensor,
    gates: torch.Tensor,
    index: torch.Tensor | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of features and gates, those that `needs` names."""
    weights = gating.expand(gates)
    weights = weights.to(at_least_float32(torch.promote_types(features.dtype, gates.dtype)))
    grads = []
    if needs[0]:
        grads.append(_by_features(grad.to(weights.dtype), features, weights, index))
    if needs[1]:
        grads.append(gating.reduce_like(_by_gates(grad.to(weights.dtype), features, weights, index), gates))
    return grads


def _by_features(
    grad: torch.Tensor, features: torch.Tensor, weights: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    total = features.new_zeros(features.shape, dtype=weights.dtype)
    heads = weights.shape[2]
    # a tensor of rows on a GPU, where `tolist` would wait for the device
    rows = range(len(features)) if index is None else index.tolist() if index.is_cpu else index
    for b, row in enumerate(rows):
        weight = weights[b if len(weights) > 1 else 0, :, None, :, None]
        share = (weight * grad[b].unflatten(-1, (heads, -1))).flatten(2)
        if isinstance(row, torch.Tensor):
            total.index_add_(0, row[None], share[None])
        else:
            total[row] += share
    return total.to(features.dtype)


def _by_gates(
    grad: torch.Tensor, features: torch.Tensor, weights: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """<grad, features of the expert> per image and head -> `[B, K, H or 1]`."""
    batch, (experts, heads) = len(grad), weights.shape[1:]
    total = grad.new_empty(batch, experts, heads)
    grad = grad.contiguous()
    if not features.is_cpu or experts < MIN_GEMV_EXPERTS:
        for images, stored in _gathered(features, index, batch, grad.dtype):
            if heads == 1:
                total[images] = torch.bmm(stored.flatten(2), grad[images].flatten(1)[:, :, None])
            else:
                by_head = grad[images].unflatten(2, (heads, -1))
                total[images] = torch.einsum("bknhd,bnhd->bkh", stored.unflatten(3, (heads, -1)), by_head)
    elif heads > 1:
        for images, bags in _bags(features, index, weights):
            total[images] = bags.dots(grad[images])
    else:
        outputs = total[:, :, 0].unbind()
        for stored, row_grad, output in zip(_rows(features, index), grad.flatten(1).unbind(), outputs, strict=True):
            torch.mv(stored.flatten(1).to(grad.dtype), row_grad, out=output)
    return total


def _rows(features: torch.Tensor, index: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """The store's row `[K,N,E]` of each image, as a view."""
    for row in range(len(features)) if index is None else index.tolist():
        yield features[row]


def _gathered(
    features: torch.Tensor, index: torch.Tensor | None, batch: int, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The images' features in dense slices of bounded size, converted to `dtype`."""
    row_bytes = features[:1].numel() * dtype.itemsize
    step = max(1, GATHER_BYTES[features.device.type] // row_bytes) if row_bytes else batch
    for start in range(0, batch, step):
        images = slice(start, min(start + step, batch))
        stored = features[images] if index is None else features[index[images]]
        yield images, stored.to(dtype).contiguous()


def _bags(features: torch.Tensor, index: torch.Tensor | None, weights: torch.Tensor) -> Iterator[tuple[slice, _Bags]]:
    """Cuts the images into bags of bounded size; dense copies of rows where the store's own layout is no table."""
    batch = len(features) if index is None else len(index)
    experts, heads = weights.shape[1:]
    direct = features.dtype == weights.dtype and _Bags.fits(features, heads)
    if direct:
        step = max(1, BAG_INDICES // (experts * heads * features.shape[2]))
        wanted = torch.arange(batch) if index is None else index
        pieces = ((slice(b, min(b + step, batch)), features, wanted[b : b + step]) for b in range(0, batch, step))
    else:
        dense = _gathered(features, index, batch, weights.dtype)
        pieces = ((images, stored, torch.arange(len(stored))) for images, stored in dense)
    for images, stored, rows in pieces:
        yield images, _Bags(stored, rows, weights if len(weights) == 1 else weights[images])


class _Bags:
    """Rows of a store as bags of `embedding_bag`: one bag per image, token and head, one entry of d per expert."""

    def __init__(self, stored: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
        self.images, self.heads = len(rows), weights.shape[2]
        self.tokens, self.unit = stored.shape[2], stored.shape[3] // self.heads
        last_block = sum((n - 1) * s for n, s in zip(stored.shape[:2], stored.stride()[:2], strict=True))
        entries = (last_block + stored.shape[2] * stored.shape[3]) // self.unit
        self.table = stored.as_strided((entries, self.unit), (self.unit, 1))
        first, second = (s // self.unit for s in stored.stride()[:2])
        expert = torch.arange(stored.shape[1]) * second
        within = torch.arange(self.tokens * self.heads)
        # [images, tokens * heads, K]
        self.indices = rows[:, None, None] * first + within[:, None] + expert
        self.weights = weights

    @staticmethod
    def fits(features: torch.Tensor, heads: int) -> bool:
        """Whether the store's memory is a table of entries."""
        unit = features.shape[3] // heads
        return features[0, 0].is_contiguous() and all(s % unit == 0 for s in features.stride()[:2])

    def _entry_weights(self) -> torch.Tensor:
        per_head = self.weights.transpose(1, 2)[:, None]  # [images or 1, 1, H, K]
        return per_head.expand(self.images, self.tokens, -1, -1).flatten(1, 2)

    def weighted_sum(self, clean: bool) -> torch.Tensor:
        """One row per bag; zero weights are left out unless there are none (`clean`)."""
        weights = self._entry_weights()
        if clean:
            indices, weights = self.indices.flatten(0, 1), weights.flatten(0, 1)
            return F.embedding_bag(indices, self.table, mode="sum", per_sample_weights=weights.contiguous())
        kept = weights != 0
        sizes = kept.sum(2).flatten()
        return F.embedding_bag(
            self.indices[kept],
            self.table,
            sizes.cumsum(0) - sizes,
            mode="sum",
            per_sample_weights=weights[kept],
        )

    def dots(self, grad: torch.Tensor) -> torch.Tensor:
        """<grad, entry> summed over tokens -> `[images, K, H]`."""
        bags, experts = self.indices.numel() // self.indices.shape[2], self.indices.shape[2]
        by_entry = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad.reshape(bags, self.unit),
            self.table,
            self.indices.flatten(),
            torch.arange(bags) * experts,
            torch.arange(bags).repeat_interleave(experts),
            0,
        )
        return by_entry.view(self.images, self.tokens, self.heads, experts).sum(1).transpose(1, 2)
