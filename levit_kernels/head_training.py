"""The training loss of one classifier with batch norm, computed together with its gradients where a backend can."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ._check import Shapes
from .backends.registry import run

NO_LABEL = -1
"""Stands in for the label of an image that has none."""


def head_training_loss(
    features: torch.Tensor,
    labels: torch.Tensor,
    weights: Sequence[torch.Tensor],
    negative_slope: float = 0.2,
    epsilon: float = 1e-5,
    bf16: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Mean cross-entropy of the labelled images behind (linear, batch norm, LeakyReLU) per hidden layer and a last
    linear one ([P] equations 5 and 9); batch norm takes the statistics of the batch, and so out any bias before it.

    Args:
        features: `[B,F]`, B >= 2 where there are hidden layers.
        labels: int64 `[B]`, -1 for an image without one; without any the loss is 0.
        weights: per hidden layer w `[out,in]`, gain `[out]`, shift `[out]`, then w `[C,in]`, b `[C]` of the last one;
            matrices as nn.Linear keeps them.
        negative_slope: of the LeakyReLU, > 0.
        epsilon: of batch norm, > 0.
        bf16: where the tensors are float32, the factors of matrix products may be rounded to bfloat16; sums and results
            stay float32. A backend that has no such products ignores it.

    Returns:
        The loss, a scalar, differentiable once in features and weights; then, without gradients, mean and biased
        variance `[out]` of x wT for each hidden layer.

    Raises:
        ValueError: a shape, device, label, slope or epsilon; TypeError: a dtype (all tensors share one).
    """
    shapes = Shapes("head_training_loss", may_be_empty="")
    shapes.match("features", features, "B F")
    check_head(shapes, labels, weights, negative_slope, epsilon, "weights")
    if len(weights) > 2 and len(features) < 2:
        raise ValueError("head_training_loss: features must have B >= 2, batch norm knows no variance of one image")
    return run("head_training_loss", features, labels, weights, negative_slope, epsilon, bf16)


def check_head(
    shapes: Shapes,
    labels: torch.Tensor,
    weights: Sequence[torch.Tensor],
    negative_slope: float,
    epsilon: float,
    name: str = "head",
) -> None:
    """Raises unless labels and weights, an argument of that name, fit the B images of F features that are bound."""
    op, batch = shapes.op, shapes.size["B"]
    if labels.dtype != torch.int64:
        raise TypeError(f"{op}: labels must be int64, got {labels.dtype}")
    if labels.shape != (batch,):
        raise ValueError(f"{op}: labels must have shape [B={batch}], got {list(labels.shape)}")
    shapes.match_device("labels", labels.device)
    if len(weights) % 3 != 2:
        raise ValueError(f"{op}: {name} must be 3 per hidden layer and 2 more, got {len(weights)}")
    inputs = "F"
    for layer in range(len(weights) // 3):
        for part, tensor, pattern in zip(
            ("w", "gain", "shift"), weights[3 * layer :], (f"h{layer} {inputs}", f"h{layer}", f"h{layer}"), strict=False
        ):
            shapes.match(f"{name}.{part}{layer}", tensor, pattern)
        inputs = f"h{layer}"
    shapes.match(f"{name}.w", weights[-2], f"C {inputs}")
    shapes.match(f"{name}.b", weights[-1], "C")
    if not (negative_slope > 0 and epsilon > 0):
        raise ValueError(f"{op}: negative_slope and epsilon must be positive, got {negative_slope} and {epsilon}")


def head_training_loss_reference(
    features: torch.Tensor,
    labels: torch.Tensor,
    weights: Sequence[torch.Tensor],
    negative_slope: float,
    epsilon: float,
    bf16: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The same in plain torch."""
    statistics: list[torch.Tensor] = []
    x = features
    for w, gain, shift in zip(*(weights[i:-2:3] for i in range(3)), strict=True):
        x = F.linear(x, w)
        statistics += [x.detach().mean(0), x.detach().var(0, correction=0)]
        x = F.batch_norm(x, None, None, gain, shift, training=True, eps=epsilon)
        x = F.leaky_relu(x, negative_slope)
    total = F.cross_entropy(F.linear(x, *weights[-2:]), labels, ignore_index=NO_LABEL, reduction="sum")
    return total / (labels != NO_LABEL).sum().clamp(min=1), *statistics
