"""What DyTox minimises: classification, distillation of the old logits, and divergence of the new token.

[P] is DyTox's paper here, [C] its authors' public code, read for facts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of every class by itself, mean over images and classes [P].

    logits [B, C]; targets [B, C], one-hot or mixed.
    """
    return F.binary_cross_entropy_with_logits(logits, targets)


def distillation_loss(logits: Tensor, old_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(old / τ) ‖ softmax(new / τ)) · τ² over the old classes, mean over images and classes [C].

    logits [B, C] of all classes, of which the first are the old ones; old_logits [B, old].
    """
    new = torch.log_softmax(logits[:, : old_logits.shape[1]] / temperature, 1)
    old = torch.log_softmax(old_logits / temperature, 1)
    return (old.exp() * (old - new)).mean() * temperature**2


def divergence_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of the last token's own classifier, which tells the new classes from "old" [P].

    logits [B, 1 + new]; targets [B, C] of all classes, of which the last are the new ones: all old ones count as one.
    """
    new = logits.shape[1] - 1
    old = targets.shape[1] - new
    return classification_loss(logits, torch.cat([targets[:, :old].sum(1, keepdim=True), targets[:, old:]], 1))


def dytox_loss(
    logits: Tensor,
    targets: Tensor,
    old_logits: Tensor | None = None,
    divergence_logits: Tensor | None = None,
    divergence: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """(1 - α) classification + α distillation + λ divergence, with α = old classes / all classes [P].

    Without old logits α is 0; without divergence logits that term is left out.
    """
    loss = classification_loss(logits, targets)
    if old_logits is not None:
        share = old_logits.shape[1] / logits.shape[1]
        loss = (1 - share) * loss + share * distillation_loss(logits, old_logits, temperature)
    if divergence_logits is not None:
        loss = loss + divergence * divergence_loss(divergence_logits, targets)
    return loss
