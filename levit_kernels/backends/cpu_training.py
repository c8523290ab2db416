"""What learns, through the native kernels: a loss comes with its gradients.

Without gradients to compute, the losses are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._loss import LossWithGradients
from ..expert_training import expert_training_loss_reference
from ..head_training import head_training_loss_reference
from ..vae_training import vae_training_loss_reference
from .cpu_fusion import dense_store


def vae_training_loss(
    images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """See levit_kernels.vae_training."""
    if not torch.is_grad_enabled():
        return vae_training_loss_reference(images, weights, beta, noise)
    return LossWithGradients.apply(lambda: vae_training_gradients(images, weights, beta, noise, bf16), True, *weights)[
        0
    ]


def vae_training_gradients(
    images: torch.Tensor, weights: Sequence[torch.Tensor], beta: float, noise: torch.Tensor, bf16: bool = False
) -> list[torch.Tensor]:
    """See levit_kernels.vae_training."""
    return torch.ops.levit_native.vae_training(images, [x.contiguous() for x in weights], beta, noise, bf16)


def head_training_loss(
    features: torch.Tensor,
    labels: torch.Tensor,
    weights: Sequence[torch.Tensor],
    negative_slope: float,
    epsilon: float,
    bf16: bool = False,
) -> tuple[torch.Tensor, ...]:
    """See levit_kernels.head_training."""
    if not torch.is_grad_enabled():
        return head_training_loss_reference(features, labels, weights, negative_slope, epsilon)

    def compute() -> list[torch.Tensor]:
        x, *dense = (x.contiguous() for x in (features, *weights))
        return torch.ops.levit_native.head_training(x, labels, dense, negative_slope, epsilon, bf16)

    return LossWithGradients.apply(compute, True, features, *weights)


def expert_training_loss(
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
    """See levit_kernels.expert_training."""
    args = (patches, labels, attention, head, num_heads, gates, features, index, negative_slope, epsilon)
    if not torch.is_grad_enabled():
        return expert_training_loss_reference(*args)
    leaves = [*attention, *head, *([] if gates is None else [gates])]
    return LossWithGradients.apply(lambda: expert_training_gradients(*args, bf16), True, *leaves)


def expert_training_gradients(
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
) -> list[torch.Tensor]:
    """See levit_kernels.expert_training."""
    own, rest = ([x.contiguous() for x in weights] for weights in (attention, head))
    table = None if gates is None else gates.contiguous().view(len(gates), -1)
    if features is not None:
        features, _, index = dense_store(features, gates, index)
    found = torch.ops.levit_native.expert_training(
        patches.contiguous(), labels, own, rest, table, features, index, num_heads, negative_slope, epsilon, bf16
    )
    if gates is not None:
        place = 1 + len(own) + len(rest)
        found[place] = found[place].view(gates.shape)
    return found


def move_statistics(
    means: Sequence[torch.Tensor],
    variances: Sequence[torch.Tensor],
    counters: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    rows: Sequence[int],
    momentum: float,
) -> None:
    """See levit_kernels.move_statistics."""
    torch.ops.levit_native.move_statistics(means, variances, counters, biases, statistics, rows, momentum)
    torch.autograd.graph.increment_version([*means, *variances, *counters])


OPS = {
    "vae_training_loss": vae_training_loss,
    "vae_training_gradients": vae_training_gradients,
    "head_training_loss": head_training_loss,
    "expert_training_loss": expert_training_loss,
    "expert_training_gradients": expert_training_gradients,
    "move_statistics": move_statistics,
}
