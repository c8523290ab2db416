"""Batch norm behind a linear map, folded into the map's weights, with the statistics of the batch at hand."""

from __future__ import annotations

from torch import Tensor, nn

from levit_kernels.batch_norm_fold import batch_norm_fold


def fold_batch_norm(linear: nn.Linear, norm: nn.BatchNorm1d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] with which `linear` alone does what `linear_norm` does on the batch x [rows, in].

    Like it, this moves the running statistics, and the bias of `linear`, which cancels, gets no gradient. Nor does x.
    """
    running = norm.running_mean, norm.running_var, norm.num_batches_tracked
    return batch_norm_fold(x, linear.weight, norm.weight, norm.bias, linear.bias, running, norm.momentum, norm.eps)
