"""expert_attention from torch calls.

Work is cut into tiles of experts x images whose tokens, queries, keys and values stay in a core's cache. Many images:
one expert and some 32 images per tile, its products through oneDNN. Few images: several experts per tile through
batched products, because launches would dominate. The gated sum is accumulated head by head, so the K outputs never
exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import torch

from .. import gates as gating
from .._check import at_least_float32
from .linear import matmul, matmul_leaky_relu

TILE_BYTES = {"cpu": 9 << 18, "cuda": 128 << 20}
MIN_BATCHED_EXPERTS = 10  # with fewer per tile a loop over experts is faster: its products are larger
MAX_JOINT_IMAGES = 24  # with more, products head by head, in place, beat one product over all after a copy

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def expert_attention(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> torch.Tensor:
    """See levit_kernels.expert_attention."""
    batch, tokens, _ = patches.shape
    experts, _, _, heads, depth = w_qkv.shape
    weights = (w_embed, b_embed, w_qkv, b_qkv)
    if gates is None:
        out = patches.new_empty(experts, batch, tokens, heads, depth)
        for tile, images in tiles((0, experts), batch, patches, w_qkv):
            _, qkv = project(patches[images], weights, tile, negative_slope)
            out[tile, images] = _outputs(qkv).unflatten(0, (tile.stop - tile.start, -1))
        return out.flatten(3)
    dtype = torch.promote_types(patches.dtype, gates.dtype)
    total = patches.new_zeros(heads, batch, tokens, depth, dtype=at_least_float32(dtype))
    per_head = gating.expand(gates).expand(-1, -1, heads).to(total.dtype)
    batched = experts_per_tile(batch, patches, w_qkv) >= MIN_BATCHED_EXPERTS
    for span, chosen, clean in routes(per_head, batched):
        rows = patches if chosen is None else patches[chosen]
        row_gates = per_head if chosen is None or len(per_head) == 1 else per_head[chosen]
        for tile, images in tiles(span, len(rows), patches, w_qkv):
            _, qkv = project(rows[images], weights, tile, negative_slope)
            tile_gates = row_gates[:, tile] if len(per_head) == 1 else row_gates[images, tile]
            where = images if chosen is None else chosen[images]
            for h in range(heads):
                _accumulate(total[h], where, attend(qkv, h), qkv[:, :, 2, h], tile_gates[:, :, h], clean)
    return total.permute(1, 2, 0, 3).to(dtype).reshape(batch, tokens, heads * depth)


def expert_attention_train(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> list[torch.Tensor]:
    """One expert -> its output, tokens `[B,N,Q]`, qkv `[B,N,3,H,d]` and attention `[H,B,N,N]`."""
    heads = w_qkv.shape[3]
    tokens, qkv = project(patches, (w_embed, b_embed, w_qkv, b_qkv), slice(0, 1), negative_slope)
    attention = torch.stack([attend(qkv, h) for h in range(heads)])
    out = torch.stack([torch.bmm(attention[h], qkv[:, :, 2, h]) for h in range(heads)], dim=2)
    if gates is None:
        out = out[None]
    else:
        dtype = torch.promote_types(patches.dtype, gates.dtype)
        gate = gating.expand(gates)[:, 0, None, :, None]
        if not patches.is_cpu or (gate == 0).any():
            out = torch.where(gate == 0, out.nan_to_num(), out)
        out = (out * gate.to(at_least_float32(dtype))).to(dtype)
    return [out.flatten(-2), tokens, qkv, attention]


def project(
    patches: torch.Tensor, weights: Weights, tile: slice, negative_slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 2 and the projections of equation 3: patches `[b,N,P]` -> tokens `[n*b,N,Q]`, qkv `[n*b,N,3,H,d]`."""
    w_embed, b_embed, w_qkv, b_qkv = weights
    batch, length, _ = patches.shape
    _, width, _, heads, depth = w_qkv.shape
    rows = patches.reshape(batch * length, -1)
    experts = tile.stop - tile.start
    if experts == 1:
        k = tile.start
        tokens = matmul_leaky_relu(rows, w_embed[k], b_embed[k], negative_slope)
        qkv = matmul(tokens, w_qkv[k].reshape(width, -1), b_qkv[k].reshape(-1))
    else:
        tokens = torch.baddbmm(b_embed[tile, None], rows.expand(experts, -1, -1), w_embed[tile])
        tokens = torch.nn.functional.leaky_relu_(tokens, negative_slope)
        qkv = torch.baddbmm(b_qkv[tile].reshape(experts, 1, -1), tokens, w_qkv[tile].reshape(experts, width, -1))
    return tokens.view(-1, length, width), qkv.view(-1, length, 3, heads, depth)


def _outputs(qkv: torch.Tensor) -> torch.Tensor:
    """Equation 3 for all heads: qkv `[n*b,N,3,H,d]` -> `[n*b,N,H,d]`.

    Not scaled_dot_product_attention, though a little faster on few images: on a CPU it turns NaN into zero.
    """
    images, length, _, heads, depth = qkv.shape
    if images > MAX_JOINT_IMAGES:
        return torch.stack([torch.bmm(attend(qkv, h), qkv[:, :, 2, h]) for h in range(heads)], dim=2)
    joint = qkv.permute(3, 0, 1, 2, 4).reshape(heads * images, length, 3, 1, depth)
    outputs = torch.bmm(attend(joint, 0), joint[:, :, 2, 0])
    return outputs.view(heads, images, length, depth).permute(1, 2, 0, 3)


def attend(qkv: torch.Tensor, head: int) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) of one head `[n*b,N,N]`; torch's softmax sums halves in float32."""
    query, key = qkv[:, :, 0, head], qkv[:, :, 1, head]
    scores = torch.baddbmm(query.new_empty(()), query, key.transpose(1, 2), beta=0, alpha=1 / math.sqrt(qkv.shape[-1]))
    return torch.softmax(scores, -1)


def _accumulate(
    total: torch.Tensor,
    where: slice | torch.Tensor,
    attention: torch.Tensor,
    value: torch.Tensor,
    gates: torch.Tensor,
    clean: bool,
) -> None:
    """total `[B,N,d]` at the tile's images += gates `[b or 1, n]` times the head's n*b outputs."""
    experts = gates.shape[1]
    if experts == 1 and clean and isinstance(where, slice) and value.dtype == total.dtype:
        total[where].baddbmm_(attention * gates[:, :, None], value)
        return
    outputs = torch.bmm(attention, value).unflatten(0, (experts, -1)).to(total.dtype)
    weights = gates.t()[:, :, None, None]
    if not clean:
        outputs = torch.where(weights == 0, outputs.nan_to_num(), outputs)
    summed = outputs.mul_(weights).sum(0)
    if isinstance(where, slice):
        total[where] += summed
    else:
        total.index_add_(0, where, summed)


def routes(per_head: torch.Tensor, batched: bool) -> Iterator[tuple[tuple[int, int], torch.Tensor | None, bool]]:
    """Which experts are worth evaluating for which images.

    Yields (first expert, end), the images that use them (None: all), and whether none of their gates is zero. On a GPU
    looking at the gates would stall the stream, so everything is evaluated there. `batched`: few images, for which
    skipping whole experts pays and picking images does not.
    """
    experts = per_head.shape[1]
    if not per_head.is_cpu:
        yield (0, experts), None, False
        return
    alive = per_head != 0
    used, clean = alive.any(2), alive.all(2).all(0).tolist()
    counts = used.sum(0).tolist()
    some = [not batched and 0 < count < len(per_head) for count in counts]
    for (count, is_clean, picks), group in groupby(range(experts), lambda k: (counts[k] > 0, clean[k], some[k])):
        span = list(group)
        if picks:
            for k in span:
                chosen = used[:, k].nonzero().flatten()
                yield (k, k + 1), chosen, bool(alive[chosen, k].all())
        elif count:
            yield (span[0], span[-1] + 1), None, is_clean


def experts_per_tile(images: int, patches: torch.Tensor, w_qkv: torch.Tensor) -> int:
    """How many experts' tokens, queries, keys and values of that many images fit into a tile."""
    return TILE_BYTES[patches.device.type] // max(1, images * _image_bytes(patches, w_qkv))


def tiles(
    span: tuple[int, int], images: int, patches: torch.Tensor, w_qkv: torch.Tensor
) -> Iterator[tuple[slice, slice]]:
    """Cuts experts [span) x images into (experts, images) slices: many experts, or one expert and as many images."""
    first, end = span
    if images == 0:
        return
    experts = experts_per_tile(images, patches, w_qkv)
    if experts >= MIN_BATCHED_EXPERTS and end - first > 1:
        for k in range(first, end, experts):
            yield slice(k, min(k + experts, end)), slice(0, images)
        return
    most = max(1, TILE_BYTES[patches.device.type] // _image_bytes(patches, w_qkv))
    step = -(-images // -(-images // most))  # equal parts, none above `most`
    for k in range(first, end):
        for b in range(0, images, step):
            yield slice(k, k + 1), slice(b, min(b + step, images))


def _image_bytes(patches: torch.Tensor, w_qkv: torch.Tensor) -> int:
    _, length, pixels = patches.shape
    _, width, three, heads, depth = w_qkv.shape
    return length * (pixels + width + three * heads * depth) * patches.element_size()
