"""Logistic regression with few non-negative slopes and no intercept: how much each score is worth."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

RIDGE = 0.1
"""Weight of the squared slopes (of scores in units of their spread), which bounds them where examples are separable."""


def fit_slopes(scores: Tensor, own: Tensor) -> Tensor:
    """θ ≥ 0 that minimises −Σ_n log softmax_k(θ · scores[n, k])[own[n]] + RIDGE/2 · Σ_f (θ_f·spread_f)².

    The problem is convex and has at most a few slopes, so Newton's method on every set of slopes that are not 0 finds
    the minimum; no step size, no random numbers.

    Args:
        scores: [n, K, F], larger speaks for k; −∞ where there is no such k.
        own: [n] int64, the right k of each row, whose scores are finite.

    Returns:
        [F] float64; 0 where a score has no spread.
    """
    rows = torch.arange(len(own), device=own.device)
    lead = scores.double() - scores.double()[rows, own][:, None]
    exists = lead.isfinite().all(-1)
    lead = lead.masked_fill(~exists[..., None], 0.0)
    spread = (lead.square().sum((0, 1)) / (exists.sum() - len(own)).clamp(min=1)).sqrt()
    useful = [f for f in range(lead.shape[-1]) if spread[f] > 0]
    best, lowest = torch.zeros_like(spread), _objective(lead[..., :0], exists, spread[:0])
    for count in range(len(useful), 0, -1):
        for chosen in map(list, itertools.combinations(useful, count)):
            theta, value = _newton(lead[..., chosen] / spread[chosen], exists)
            if value < lowest and (theta >= 0).all():
                best, lowest = torch.zeros_like(spread), value
                best[chosen] = theta / spread[chosen]
    return best


def _newton(lead: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """The unconstrained minimum and its value; a step that overshoots is halved."""
    theta = lead.new_zeros(lead.shape[-1])
    value = _objective(lead, exists, theta)
    for _ in range(50):
        p = (lead @ theta).masked_fill(~exists, -torch.inf).softmax(1)
        mean = (p[..., None] * lead).sum(1)
        gradient = mean.sum(0) + RIDGE * theta
        curvature = torch.einsum("nk,nkf,nkg->fg", p, lead, lead) - mean.T @ mean
        step = torch.linalg.solve(curvature + RIDGE * torch.eye(len(theta)).to(theta), gradient)
        scale = 1.0
        while (found := _objective(lead, exists, theta - scale * step)) > value and scale > 1e-6:
            scale /= 2
        if not found < value:
            break
        theta, value = theta - scale * step, found
    return theta, value


def _objective(lead: Tensor, exists: Tensor, theta: Tensor) -> Tensor:
    logits = (lead @ theta).masked_fill(~exists, -torch.inf)
    return logits.logsumexp(1).sum() + RIDGE / 2 * theta.square().sum()
