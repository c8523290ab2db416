"""Which expert an image goes to: by its VAE loss, by a streaming LDA in a shared space, or by both.

`vae` [P] is k*(x) = argmin_k VAE loss_k(x); `levit.LEViT.route` has it, a router is not needed for it.
`shared` is argmax_k p(k | x) with p(k | x) = Σ_c p(c | x)·p(k | c): the LDA's class posterior, and the share of class
c's images that expert k learned from (a class may span experts).
`fused` is argmax_k a·log p(k | x) − b·VAE loss_k(x), with a, b ≥ 0 by logistic regression on `levit.examples`.

What label the chosen expert gives an image is the largest of its own logits, or, with `prior="shared"`, of
s1·logit_kc + s2·LDA_c over the classes c that expert k has learned, with s1, s2 ≥ 0 fitted on the same examples. Over
those alone, because an example is its own expert's image: that another class is unlikely then says nothing about an
image which came to the wrong expert, and which expert it is has been decided, with the LDA's advice, before. Too few
examples: as without a prior.

Every rule looks at one image alone and draws no random number. Until there is enough to go by (`SharedSpace` has its
filters and a class; `fused` has its slopes), images are routed by `vae`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from levit.config import LEViTConfig
from levit.examples import Examples
from levit.patch_features import PatchFeatures
from levit.shared_space import SharedSpace

if TYPE_CHECKING:
    from levit.reference import LEViT

LEAST = 1e-20
"""Smallest p(k | x), so that no expert is ruled out whatever its VAE says."""


class Prediction(NamedTuple):
    """What `LEViT.predict` says of each image."""

    label: Tensor
    """[B] int64."""
    expert: Tensor
    """[B] int64, the expert that said so."""
    confidence: Tensor
    """[B], the probability that the label is right."""
    known: Tensor
    """[B] bool, whether at least one expert's VAE explains the image."""


@dataclass(frozen=True)
class Plan:
    """All that routing needs of what was seen so far, solved and fitted; good until more is seen."""

    shared: float
    """a of the score a·log p(k | x) − b·VAE loss_k(x)"""
    vae: float
    """b; one of the two is positive."""
    fitted: bool = False
    """Whether the softmax of the scores is a probability: a and b come from examples."""
    features: PatchFeatures | None = None
    """None where a is 0 and there is no prior; the next three then too."""
    weights: Tensor | None = None
    """[D, classes]"""
    bias: Tensor | None = None
    """[classes]"""
    expert_of_class: Tensor | None = None
    """p(k | c), [classes, K]"""
    sharpness: float = 1.0
    """Factor of an expert's logits (1/temperature); 1 with a prior, which has its own."""
    prior: tuple[float, float] | None = None
    """s1 and s2 of the label's score s1·logit_kc + s2·LDA_c; None where the logits alone decide."""
    candidates: Tensor | None = None
    """[K, classes] bool, which classes an expert chooses from with a prior."""
    known_limits: Tensor | None = None
    """[K], `Examples.known_limits`"""


class Router(nn.Module):
    """What a model knows beside its experts about which of them an image belongs to. Only buffers.

    Args:
        cfg: configuration.
        experts: K, more come with `add_expert`.
        waiting: see `SharedSpace`.
    """

    def __init__(self, cfg: LEViTConfig, experts: int = 1, waiting: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.shared = SharedSpace(cfg, waiting) if cfg.routing != "vae" else None
        fits = cfg.routing == "fused" or cfg.calibration or cfg.prior != "none"
        self.examples = Examples(cfg, experts) if fits else None
        self.register_buffer("class_counts", torch.zeros(experts, cfg.num_classes, dtype=torch.int64))
        self.routing, self.prior = cfg.routing, cfg.prior
        self._plan: Plan | None = None

    @classmethod
    def create(cls, cfg: LEViTConfig, experts: int = 1, state: Mapping[str, Tensor] | None = None) -> Router | None:
        """A router as the configuration asks for, shaped for a `state` of the model if given; None if not needed."""
        if cfg.routing == "vae" and not cfg.calibration:
            return None
        waiting = (state or {}).get("router.shared.waiting_labels", ())
        return cls(cfg, experts, len(waiting))

    def add_expert(self) -> None:
        """Make room for one more expert."""
        self._plan = None
        if self.examples is not None:
            self.examples.add_expert()
        self.class_counts = torch.cat([self.class_counts, torch.zeros_like(self.class_counts[:1])])

    @torch.no_grad()
    def observe(self, model: LEViT, images: Tensor, labels: Tensor, expert: int) -> None:
        """Take in a batch of the stream that `expert` will learn from next: [b, C, S, S] and [b], -1 for no label."""
        self._plan = None
        if self.examples is not None and (due := list(self.examples.due(len(images)))):
            probes, known = images[due], labels[due]
            recent = None if self.shared is None else self.shared.recent_logits(probes)
            log_p = self._held_out_log_probs(recent, known)
            scores = torch.stack([log_p, -model.elbo_loss(probes)], dim=-1)
            self.examples.add(expert, scores, model.forward_expert(probes, expert), known, recent)
        if self.shared is not None:
            self.shared.observe(images, labels)
        self.class_counts[expert] += torch.bincount(labels[labels >= 0], minlength=self.cfg.num_classes)

    def switch(self, routing: str | None = None, prior: str | None = None) -> None:
        """Answer by another rule than the configuration's from now on; what is learned and saved stays the same.

        Raises:
            ValueError: no such rule, or one that needs a shared space or its examples, which this router does not keep.
        """
        routing, prior = routing or self.routing, prior or self.prior
        possible = ("vae", "shared", "fused") if self.shared is not None else ("vae",)
        if routing not in possible:
            raise ValueError(f"routing: expected {' or '.join(possible)} of this model, got {routing!r}")
        possible = ("none",) if self.cfg.prior == "none" else ("none", "shared")
        if prior not in possible:
            raise ValueError(f"prior: expected {' or '.join(possible)} of this model, got {prior!r}")
        self.routing, self.prior, self._plan = routing, prior, None

    def class_logits(self, images: Tensor) -> Tensor | None:
        """What the shared space says of images, [B, C, S, S] → [B, classes]; None where nothing asks for it.

        Both the choice of an expert and the label rest on it; the methods below take it, where it is known already.
        """
        plan = self.plan()
        return None if plan.features is None else plan.features(images) @ plan.weights + plan.bias

    def route(
        self, images: Tensor, vae_losses: Callable[[Tensor], Tensor], class_logits: Tensor | None = None
    ) -> Tensor:
        """The expert of each image, [B, C, S, S] → [B]; `vae_losses` gives [B, K] and is asked only if needed."""
        return self.scores(images, vae_losses, class_logits).argmax(dim=1)

    def route_sparingly(
        self,
        images: Tensor,
        vae_losses: Callable[[Tensor], Tensor],
        expert_vae_loss: Callable[[Tensor, int], Tensor],
        class_logits: Tensor | None = None,
    ) -> Tensor:
        """`route`, with no more VAE losses than decide; `expert_vae_loss` gives those of one expert, [B].

        A VAE loss is never negative, so a·log p(k | x) bounds expert k's score from above. An image asks the experts'
        VAEs in the order of these bounds, until none exceeds the best score so far.
        """
        plan = self.plan()
        if not plan.shared or not plan.vae:
            return self.route(images, vae_losses, class_logits)
        bounds = self._shared_scores(images, plan, class_logits)
        order = bounds.argsort(dim=1, descending=True)
        scores = torch.full_like(bounds, -torch.inf)
        for asked in order.unbind(1):
            # An equal bound is asked as well: among equal scores the first expert is the answer.
            undecided = bounds.gather(1, asked[:, None])[:, 0] >= scores.amax(1)
            if not undecided.any():
                break
            for k in asked[undecided].unique().tolist():
                rows = (undecided & (asked == k)).nonzero().squeeze(1)
                scores[rows, k] = bounds[rows, k] - plan.vae * expert_vae_loss(images[rows], k)
        return scores.argmax(1)

    def scores(
        self, images: Tensor, vae_losses: Callable[[Tensor], Tensor], class_logits: Tensor | None = None
    ) -> Tensor:
        """a·log p(k | x) − b·VAE loss_k(x): [B, C, S, S] → [B, K]."""
        plan = self.plan()
        scores = self._shared_scores(images, plan, class_logits) if plan.shared else 0.0
        return scores - plan.vae * vae_losses(images) if plan.vae else scores

    def _shared_scores(self, images: Tensor, plan: Plan, class_logits: Tensor | None) -> Tensor:
        class_logits = self.class_logits(images) if class_logits is None else class_logits
        return plan.shared * expert_log_probs(class_logits, plan.expert_of_class)

    def with_prior(self, logits: Tensor, class_logits: Tensor | None, routes: Tensor) -> Tensor:
        """What labels rest on: the chosen experts' logits [B, classes], or s1·logits + s2·LDA, −∞ where not learned.

        `class_logits` are this router's of the same images, `routes` [B] who was chosen.
        """
        plan = self.plan()
        if plan.prior is None:
            return logits
        candidates, (own, shared) = plan.candidates[routes], plan.prior
        joined = own * logits + shared * class_logits.masked_fill(~candidates, 0.0)
        return joined.masked_fill(~candidates, -torch.inf)

    def plan(self) -> Plan:
        """Solve and fit what routing and prediction need; kept until the next `observe`."""
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    def _make_plan(self) -> Plan:
        shared, routing = self.shared, self.routing
        serves = shared is not None and bool(shared.fixed) and bool(shared.lda.counts.any())
        used = {"vae": [1], "shared": [0], "fused": [0, 1]}[routing]
        slopes = None
        if self.examples is not None and (serves or routing == "vae"):
            slopes = self.examples.slopes(used, self.class_counts)
        fitted = slopes is not None and bool(slopes.any())
        if fitted:
            a, b = slopes.tolist()
        else:
            a, b = (1.0, 0.0) if serves and routing == "shared" else (0.0, 1.0)
        prior = self._prior() if serves else None
        asked = a or prior is not None
        solved = (shared.features, *shared.lda.solve(), self._expert_of_class()) if asked else (None,) * 4
        if self.examples is None:
            return Plan(a, b, fitted, *solved)
        sharpness = self.examples.sharpness(self.class_counts) if prior is None else 1.0
        candidates = None if prior is None else self._candidates()
        return Plan(a, b, fitted, *solved, sharpness, prior, candidates, self.examples.known_limits(self.class_counts))

    def _prior(self) -> tuple[float, float] | None:
        slopes = self.examples.label_slopes(self.class_counts) if self.prior == "shared" else None
        return tuple(slopes.tolist()) if slopes is not None and bool(slopes.any()) else None

    def _candidates(self) -> Tensor:
        """What each expert has learned; all that is known where it saw no label. The space knows all of these."""
        learned = self.class_counts > 0
        return torch.where(learned.any(1, keepdim=True), learned, self.shared.lda.counts > 0)

    def _expert_of_class(self) -> Tensor:
        counts = self.class_counts.T.to(self.shared.recent_bias.dtype)
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def _held_out_log_probs(self, class_logits: Tensor | None, labels: Tensor) -> Tensor:
        """log p(k | x) by what was seen a while ago, [b, K]; −∞ where the image's class was not seen then."""
        if class_logits is None:
            return self.examples.scores.new_full((len(labels), len(self.examples.taken)), -torch.inf)
        log_p = expert_log_probs(class_logits, self._expert_of_class())
        seen = (labels >= 0) & self.shared.recent_bias.isfinite()[labels]
        return log_p.masked_fill(~seen[:, None], -torch.inf)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        self._plan = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._plan = None
        super()._load_from_state_dict(*args, **kwargs)


def expert_log_probs(class_logits: Tensor, expert_of_class: Tensor) -> Tensor:
    """log Σ_c p(c | x)·p(k | c), at least log `LEAST`: [B, classes] and p(k | c) [classes, K] → [B, K]."""
    return (class_logits.softmax(dim=1) @ expert_of_class).clamp(min=LEAST).log()
