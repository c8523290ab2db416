"""What the model said of images of the stream before it learned from them: held-out examples that cost no image.

Of one image in `EVERY`, fewer where routing samples codes, the scores, the logits and the label are kept, the latest
`ROWS` of each expert. An arriving image was never trained on, so its row is what a test image's would be, and the
latest rows of an expert show it at its best: when it is frozen they stay as they are. A row says nothing of experts
that came later, which cannot be known without the image; the regressions on these rows therefore compare with the
experts that there were.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from levit.config import LEViTConfig
from levit.logistic import fit_slopes

EVERY = 5
"""One image in so many is looked at, where routing takes the mean code."""
CODES_AT_ONCE = 2
"""Where it takes S codes, images are looked at S / 2 times as rarely: each costs S decodings by every expert."""
ROWS = 64
"""Rows per expert, of its latest images: more would show it less ripe, fewer would be few."""
STRANGER = 0.1
"""Rows of a class that an expert saw less than so often as its most frequent one are left out: images that came after
a change, before it was noticed."""
ENOUGH = 20
"""Rows that a fit takes."""
KNOWN_DEVIATIONS = 3.0
"""An expert explains an image whose log VAE loss lies at most so many deviations above the expert's median."""


class Examples(nn.Module):
    """The table of rows, and what is fitted on it. Only buffers.

    Args:
        cfg: its `num_classes`, `route_samples` and `prior`.
        experts: K, more come with `add_expert`.
    """

    def __init__(self, cfg: LEViTConfig, experts: int = 1) -> None:
        super().__init__()
        self.route_samples = cfg.route_samples
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("taken", torch.zeros(experts, dtype=torch.int64))
        # Last dimension: log p(k | x) of the shared space, minus the VAE loss; −∞ where it is not known.
        self.register_buffer("scores", torch.full((experts, ROWS, experts, 2), -torch.inf))
        self.register_buffer("logits", torch.zeros(experts, ROWS, cfg.num_classes))
        self.register_buffer("labels", torch.full((experts, ROWS), -1))
        # Class logits of the shared space as they were then; −∞ for classes not seen by then.
        shape = (experts, ROWS, cfg.num_classes)
        self.register_buffer("shared_logits", torch.full(shape, -torch.inf) if cfg.prior == "shared" else None)

    def add_expert(self) -> None:
        """Make room for one more expert's rows, and for its scores in them."""
        experts = len(self.taken)
        scores = self.scores.new_full((experts + 1, ROWS, experts + 1, 2), -torch.inf)
        scores[:experts, :, :experts] = self.scores
        self.scores = scores
        self.taken = torch.cat([self.taken, self.taken.new_zeros(1)])
        self.logits = torch.cat([self.logits, self.logits.new_zeros(1, *self.logits.shape[1:])])
        self.labels = torch.cat([self.labels, self.labels.new_full((1, ROWS), -1)])
        if self.shared_logits is not None:
            unknown = torch.full_like(self.shared_logits[:1], -torch.inf)
            self.shared_logits = torch.cat([self.shared_logits, unknown])

    def due(self, count: int) -> range:
        """Which of the next `count` images of the stream to look at; they count as seen."""
        every = EVERY * max(1, self.route_samples // CODES_AT_ONCE)
        start = -int(self.seen) % every
        self.seen += count
        return range(start, count, every)

    @torch.no_grad()
    def add(
        self, expert: int, scores: Tensor, logits: Tensor, labels: Tensor, shared_logits: Tensor | None = None
    ) -> None:
        """Rows of images that `expert` is about to learn from: scores [b, K, 2], its logits [b, classes], labels [b].

        With prior `shared` the shared space's logits [b, classes] too. The oldest rows of the expert make room.
        """
        scores, logits, labels = scores[-ROWS:], logits[-ROWS:], labels[-ROWS:]
        slots = (int(self.taken[expert]) + torch.arange(len(labels), device=labels.device)) % ROWS
        self.scores[expert, slots] = scores
        self.logits[expert, slots] = logits
        self.labels[expert, slots] = labels
        if self.shared_logits is not None:
            self.shared_logits[expert, slots] = shared_logits[-ROWS:]
        self.taken[expert] += len(labels)

    def slopes(self, used: list[int], class_counts: Tensor) -> Tensor | None:
        """How much the `used` scores (0: shared, 1: VAE) say about the expert, [2], others 0; None: too few rows.

        `class_counts` [K, classes] says how many images of each class each expert learned from, here and below.
        By maximum likelihood of the expert that learned from the image, softmax over the experts that there were.
        """
        experts = torch.arange(len(self.taken), device=self.taken.device)
        own = experts[:, None].expand(-1, ROWS)
        scores = self.scores[..., used]
        there = scores.isfinite().all(-1)
        rows = self._usable(class_counts) & there[experts, :, experts] & (there.sum(-1) > 1)
        if rows.sum() < ENOUGH:
            return None
        slopes = torch.zeros(2, dtype=torch.float64, device=own.device)
        slopes[used] = fit_slopes(scores[rows], own[rows])
        return slopes

    def label_slopes(self, class_counts: Tensor) -> Tensor | None:
        """How much an expert's logits and the shared space's say about the label of its image, [2]; None: too few rows.

        By maximum likelihood of the label, softmax over the classes that the expert learned and the space knew then.
        """
        known = self.shared_logits.isfinite() & (class_counts > 0)[:, None]
        rows = self._usable(class_counts) & (self.labels >= 0) & (known.sum(-1) > 1)
        rows &= known.gather(2, self.labels.clamp(min=0)[..., None])[..., 0]
        if rows.sum() < ENOUGH:
            return None
        scores = torch.stack([self.logits[rows], self.shared_logits[rows]], dim=-1)
        return fit_slopes(scores.masked_fill(~known[rows][..., None], -torch.inf), self.labels[rows])

    def sharpness(self, class_counts: Tensor) -> float:
        """1/T: the factor that makes an expert's softmax as likely as it can be on the labels; 1 with too few rows."""
        rows = self._usable(class_counts) & (self.labels >= 0)
        if rows.sum() < ENOUGH:
            return 1.0
        return float(fit_slopes(self.logits[rows][..., None], self.labels[rows]))

    def known_limits(self, class_counts: Tensor) -> Tensor:
        """Log VAE loss up to which each expert explains an image, [K]; infinite where it has too few rows.

        Median + `KNOWN_DEVIATIONS` · 1.4826 · MAD of what the expert's own arriving images had: were log losses normal,
        0.13 % of an expert's own images would lie above its limit; any other expert that explains them lowers that.
        """
        limits = self.scores.new_full((len(self.taken),), torch.inf)
        for k, rows in enumerate(self._usable(class_counts)):
            if rows.sum() >= ENOUGH:
                loss = (-self.scores[k, rows, k, 1]).log()
                middle = loss.median()
                limits[k] = middle + KNOWN_DEVIATIONS * 1.4826 * (loss - middle).abs().median()
        return limits

    def _usable(self, class_counts: Tensor) -> Tensor:
        """Which rows there are and are no stranger's, [K, ROWS]."""
        filled = torch.arange(ROWS, device=self.taken.device) < self.taken[:, None]
        usual = class_counts >= STRANGER * class_counts.amax(1, keepdim=True)
        return filled & (usual.gather(1, self.labels.clamp(min=0)) | (self.labels < 0))
