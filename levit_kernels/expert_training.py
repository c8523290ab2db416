"""The training loss of one expert's classifier, from patches to labels, computed together with all its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import gates as gating
from ._check import Shapes
from .backends.registry import find_kernel, run
from .dkf_fuse import check_index
from .head_training import check_head, head_training_loss_reference

ATTENTION = {"w_embed": "Q P", "gain": "Q", "shift": "Q", "w_qkv": "R Q", "b_qkv": "R"}
"""The embedding with its batch norm, then the rows (query | key | value, head, channel) of equation 3."""


def expert_training_loss(
    patches: torch.Tensor,
    labels: torch.Tensor,
    attention: Sequence[torch.Tensor],
    head: Sequence[torch.Tensor],
    num_heads: int,
    gates: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    negative_slope: float = 0.2,
    epsilon: float = 1e-5,
    bf16: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Mean cross-entropy of the labelled images under the expert in training ([P] equations 2-5, 8 and 9, batch
    statistics). Frozen experts take part through stored features.

    Args:
        patches: `[B,N,P]`, B >= 2. They get no gradient.
        labels: int64 `[B]`, -1 for an image without one; without any the loss is 0.
        attention: w_embed `[Q,P]`, its batch norm's gain and shift `[Q]`, w_qkv `[3*H*d,Q]`, b_qkv `[3*H*d]`, as
            nn.Linear keeps them. Batch norm takes out any bias of the embedding. Behind it in the head, another one
            takes out the values' bias, whose gradient is zero then.
        head: as `levit_kernels.head_training` takes weights.
        num_heads: H.
        gates: None, or `[K]` or `[K,H]`, the last for this expert's own features, the others for stored ones.
        features: of the K-1 frozen experts `[M,K-1,N,H*d]`, in any floating dtype, without gradient; None: K is 1.
        index: int64 `[B]`, which row is each image's; None where M is B and they are in order.
        negative_slope: of every LeakyReLU, > 0.
        epsilon: of every batch norm, > 0.
        bf16: where the tensors are float32, the factors of matrix products may be rounded to bfloat16; sums and results
            stay float32. A backend that has no such products ignores it.

    Returns:
        The loss, a scalar, differentiable once in attention, head and gates; then, without gradients, mean and biased
        variance of patches w_embedT `[Q]`, and of x wT `[out]` for each hidden layer of the head.

    Raises:
        ValueError: a shape, device, label, slope or epsilon; TypeError: a dtype (all but features share one);
            IndexError: an index outside [0, M) (on a GPU a device-side assertion).
    """
    args = (patches.detach(), labels, attention, head, num_heads, gates, features, index, negative_slope, epsilon)
    _check("expert_training_loss", *args)
    return run("expert_training_loss", *args, bf16)


def expert_training_gradients(
    patches: torch.Tensor,
    labels: torch.Tensor,
    attention: Sequence[torch.Tensor],
    head: Sequence[torch.Tensor],
    num_heads: int,
    gates: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    negative_slope: float = 0.2,
    epsilon: float = 1e-5,
    bf16: bool = False,
) -> list[torch.Tensor] | None:
    """What `expert_training_loss` returns, with the gradients of the loss in attention, head and gates behind the loss;
    no graph is kept of them. None where no kernel computes that. Arguments and errors are the same.
    """
    args = (patches, labels, attention, head, num_heads, gates, features, index, negative_slope, epsilon)
    _check("expert_training_gradients", *args)
    kernel = find_kernel("expert_training_gradients", *args, bf16)
    with torch.no_grad():
        return kernel and kernel(*args, bf16)


def _check(
    op: str,
    patches: torch.Tensor,
    labels: torch.Tensor,
    attention: Sequence[torch.Tensor],
    head: Sequence[torch.Tensor],
    num_heads: int,
    gates: torch.Tensor | None,
    features: torch.Tensor | None,
    index: torch.Tensor | None,
    negative_slope: float,
    epsilon: float,
) -> None:
    shapes = Shapes(op, may_be_empty="")
    shapes.match("patches", patches, "B N P")
    shapes.match_list("attention", attention, ATTENTION)
    if shapes.size["R"] % (3 * num_heads):
        raise ValueError(
            f"{op}: attention.w_qkv must have 3 rows per channel of {num_heads} heads, got {shapes.size['R']}"
        )
    width = shapes.size["R"] // 3
    shapes.size |= {"H": num_heads, "E": width, "F": shapes.size["N"] * width}
    if gates is not None:
        shapes.match("gates", gates, "K" if gates.dim() == 1 else "K H")
    if features is not None:
        if gates is None:
            raise ValueError(f"{op}: features of frozen experts need gates, got None")
        shapes.match("features", features, f"M {len(gates) - 1} N E", same_dtype=False)
        if index is None and len(features) != len(patches):
            raise ValueError(f"{op}: without an index features must have M = B = {len(patches)}, got {len(features)}")
        if index is not None:
            if index.dtype != torch.int64 or index.shape != patches.shape[:1]:
                raise ValueError(f"{op}: index must be int64 [B={len(patches)}], got {index.dtype} {list(index.shape)}")
            shapes.match_device("index", index.device)
            check_index(op, index, len(features))
    elif gates is not None and len(gates) != 1:
        raise ValueError(f"{op}: gates of {len(gates)} experts need features of the others, got None")
    check_head(shapes, labels, head, negative_slope, epsilon)
    if len(patches) < 2:
        raise ValueError(f"{op}: patches must have B >= 2, batch norm knows no variance of one image")


def expert_training_loss_reference(
    patches: torch.Tensor,
    labels: torch.Tensor,
    attention: Sequence[torch.Tensor],
    head: Sequence[torch.Tensor],
    num_heads: int,
    gates: torch.Tensor | None,
    features: torch.Tensor | None,
    index: torch.Tensor | None,
    negative_slope: float,
    epsilon: float,
    bf16: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The same in plain torch."""
    w_embed, gain, shift, w_qkv, b_qkv = attention
    embedded = F.linear(patches.flatten(0, 1), w_embed)
    statistics = embedded.detach().mean(0), embedded.detach().var(0, correction=0)
    normal = F.batch_norm(embedded, None, None, gain, shift, training=True, eps=epsilon)
    tokens = F.leaky_relu(normal, negative_slope).unflatten(0, patches.shape[:2])  # equation 2
    if len(head) > 2:
        scores, values = b_qkv.tensor_split([2 * len(b_qkv) // 3])
        b_qkv = torch.cat([scores, values.detach()])
    query, key, value = F.linear(tokens, w_qkv, b_qkv).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    attended = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), -1) @ value  # equation 3
    fused = attended.transpose(1, 2).flatten(2)  # equation 4
    if gates is not None:
        outputs = fused[:, None]
        if features is not None:
            stored = features if index is None else features[index]
            outputs = torch.cat([stored.detach().to(fused.dtype), outputs], 1)
        fused = gating.gated_sum(outputs, gates)  # equation 8
    loss, *others = head_training_loss_reference(fused.flatten(1), labels, head, negative_slope, epsilon)
    return loss, *statistics, *others
