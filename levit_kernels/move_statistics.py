"""Running statistics of batch norms after a batch whose own ones a kernel has found."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backends.registry import run_or


@torch.no_grad()
def move_statistics(
    means: Sequence[torch.Tensor],
    variances: Sequence[torch.Tensor],
    counters: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    rows: Sequence[int],
    momentum: float,
) -> None:
    """What nn.BatchNorm1d does to its buffers in training, for several layers at once and in place: mean and unbiased
    variance move by `momentum` of the way towards the batch's, the counter by one.

    Args:
        means: running means `[out]`, one of each layer, as all that follows.
        variances: running variances `[out]`.
        counters: batches seen, int64 scalars.
        biases: of the linear layers before, `[out]`.
        statistics: of the batch, layer by layer mean `[out]`, without that bias, and biased variance `[out]`.
        rows: how many the batch had, >= 2.
        momentum: in [0, 1].

    Raises:
        ValueError: another number of tensors, rows or momentum; RuntimeError: a shape.
    """
    layers = len(means)
    for name, values in (("variances", variances), ("counters", counters), ("biases", biases), ("rows", rows)):
        if len(values) != layers:
            raise ValueError(f"move_statistics: {name} must be {layers} like means, got {len(values)}")
    if len(statistics) != 2 * layers:
        raise ValueError(f"move_statistics: statistics must be {2 * layers}, two per layer, got {len(statistics)}")
    if not (0 <= momentum <= 1 and all(count >= 2 for count in rows)):
        raise ValueError(
            f"move_statistics: rows must be at least 2 and momentum in [0, 1], got {list(rows)} and {momentum}"
        )
    if layers:
        args = (means, variances, counters, biases, statistics, rows, momentum)
        run_or(move_statistics_reference, "move_statistics", *args)


def move_statistics_reference(
    means: Sequence[torch.Tensor],
    variances: Sequence[torch.Tensor],
    counters: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    rows: Sequence[int],
    momentum: float,
) -> None:
    """The same in plain torch."""
    found = torch._foreach_add(list(statistics[::2]), list(biases))
    spread = torch._foreach_mul(list(statistics[1::2]), [count / (count - 1) for count in rows])
    torch._foreach_lerp_([*means, *variances], [*found, *spread], momentum)
    torch._foreach_add_(list(counters), 1)
