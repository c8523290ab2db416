"""Linear discriminant analysis of a stream: class sums and one second moment, each row seen once.

What is kept does not depend on the order of the rows but for rounding, so nothing can be forgotten; the price is that
all classes share one covariance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SHRINKAGE = 1e-2
"""The covariance W becomes (1 − s)·W + s·tr(W)/D·I."""
BLOCK = 256
"""Rows taken into the second moment at a time: one matrix product, at the same rows whatever the batches were."""


class StreamingLDA(nn.Module):
    """Streaming LDA over D features: Gaussian classes with one covariance and equal priors.

    With n_c, μ_c the count and the mean of class c and W the pooled covariance within classes, shrunk,
    logit_c(f) = f·W⁻¹μ_c − ½ μ_c·W⁻¹μ_c. Classes not seen have −∞ (0 while none was seen). Only buffers.

    Args:
        dim: D. The rows should be roughly centred: the second moment is kept in the module's own precision.
        classes: how many there can be.
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("second_moment", torch.zeros(dim, dim))
        self.register_buffer("sums", torch.zeros(classes, dim))
        self.register_buffer("counts", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("waiting", torch.zeros(BLOCK, dim))
        self.register_buffer("waiting_labels", torch.zeros(BLOCK, dtype=torch.int64))
        self._solution: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def observe(self, rows: Tensor, labels: Tensor) -> None:
        """Take in rows [B, D] with labels [B] int64; rows with a negative label (none) are left out.

        An unlabelled row belongs to some class's scatter, but to whose is unknown, so it cannot help this estimate.
        """
        labelled = labels >= 0
        if not labelled.all():
            rows, labels = rows[labelled], labels[labelled]
        slot = int(self.counts.sum()) % BLOCK
        while len(rows):
            count = min(BLOCK - slot, len(rows))
            self.waiting[slot : slot + count] = rows[:count]
            self.waiting_labels[slot : slot + count] = labels[:count]
            self.counts += torch.bincount(labels[:count], minlength=len(self.counts))
            rows, labels, slot = rows[count:], labels[count:], slot + count
            if slot == BLOCK:
                second_moment, sums = self._moments(BLOCK)
                self.second_moment.copy_(second_moment)
                self.sums.copy_(sums)
                slot = 0
        self._solution = None

    @torch.no_grad()
    def solve(self) -> tuple[Tensor, Tensor]:
        """(weights [D, classes], bias [classes]) of the logits; kept until the next `observe`."""
        if self._solution is None:
            total = int(self.counts.sum())
            second_moment, sums = (moment.double() for moment in self._moments(total % BLOCK))
            means = sums / self.counts.clamp(min=1)[:, None]
            scatter = (second_moment - (means * self.counts[:, None]).T @ means) / max(total, 1)
            # Where no class has two different rows, the rows' own size stands in for the scatter that is unknown.
            size = torch.stack([scatter.diagonal().mean(), 1e-6 * second_moment.diagonal().mean() / max(total, 1)])
            ridge = SHRINKAGE * size.max().clamp(min=1e-12)
            weights = torch.cholesky_solve(means.T, _factor((1 - SHRINKAGE) * scatter, ridge))
            bias = -0.5 * (means.T * weights).sum(0)
            if total:
                bias = bias.masked_fill(self.counts == 0, -torch.inf)
            self._solution = weights.to(self.sums), bias.to(self.sums)
        return self._solution

    def forward(self, rows: Tensor) -> Tensor:
        """[B, D] → class logits [B, classes]."""
        weights, bias = self.solve()
        return rows @ weights + bias

    def _moments(self, waiting: int) -> tuple[Tensor, Tensor]:
        """Second moment and class sums, the first `waiting` rows that wait included."""
        rows = self.waiting[:waiting]
        sums = self.sums.index_add(0, self.waiting_labels[:waiting], rows)
        return torch.addmm(self.second_moment, rows.T, rows), sums

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StreamingLDA:
        self._solution = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._solution = None
        super()._load_from_state_dict(*args, **kwargs)


def _factor(scatter: Tensor, ridge: Tensor) -> Tensor:
    """Cholesky factor of scatter + ridge·I; more of a ridge where rounding left the scatter that far below zero."""
    while True:
        raised = scatter.clone()
        raised.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not failed:
            return factor
        ridge = 10 * ridge
