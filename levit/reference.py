"""LEViT as SPEC.md writes it, equation by equation, in plain torch: the oracle of every test and the measure of speed.

Nothing here is clever. Symbols and equation numbers are SPEC.md's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levit.cache import KnowledgeCache, MemoryCache
from levit.calibrated import Surprise, label_surprise
from levit.checks import check_images, check_labels
from levit.config import LEViTConfig
from levit.expert import NEGATIVE_SLOPE, Expert, linear_norm
from levit.export import load_model, save_model
from levit.memory import Memory
from levit.noise import fixed_noise, position_noise
from levit.routing import Prediction, Router
from levit.transfer import to_device
from levit_kernels.head_training import NO_LABEL

if TYPE_CHECKING:
    from typing_extensions import Self


def patches(images: Tensor, patch_size: int) -> Tensor:
    """Equation 1: images [B, C, S, S] → patches side by side [B, N, P²C], row-major; each is flattened C, P, P."""
    batch, channels, side, _ = images.shape
    grid = images.reshape(batch, channels, side // patch_size, patch_size, side // patch_size, patch_size)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def tokens(expert: Expert, patches: Tensor, batch_statistics: bool = False) -> Tensor:
    """Equation 2: z = LeakyReLU(BN(patches·E + e)), [B, N, P²C] → [B, N, Q]; BN takes every token as a sample."""
    embedded = linear_norm(expert.embed, expert.norm, patches.flatten(0, 1), batch_statistics)
    return F.leaky_relu(embedded, NEGATIVE_SLOPE).unflatten(0, patches.shape[:2])


def attention_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 3: softmax(q kᵀ/√d) v, within each image; [B, N, d] each → [B, N, d]."""
    return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), dim=-1) @ v


def self_attention(expert: Expert, z: Tensor, num_heads: int) -> Tensor:
    """Equation 4: MHSA(z) = concat over heads of equation 3, [B, N, Q] → [B, N, H·d]."""
    q, k, v = expert.qkv(z).chunk(3, dim=-1)
    heads = zip(q.chunk(num_heads, -1), k.chunk(num_heads, -1), v.chunk(num_heads, -1), strict=True)
    return torch.cat([attention_head(*head) for head in heads], dim=-1)


def features(expert: Expert, images: Tensor, cfg: LEViTConfig, batch_statistics: bool = False) -> Tensor:
    """What expert k makes of images before fusion, MHSA_k(z_k) or the MLP's output: [B, C, S, S] → [B, N, E]."""
    if cfg.expert == "dnn":
        hidden = images.flatten(1)
        for layer in expert.hidden:
            hidden = F.leaky_relu(layer(hidden), NEGATIVE_SLOPE)
        return hidden[:, None]
    z = tokens(expert, patches(images, cfg.patch_size), batch_statistics)
    if cfg.pos_embed:
        z = z + expert.position
    attended = self_attention(expert, z, cfg.num_heads)
    return expert.out_proj(attended) if cfg.out_proj else attended


def gated_sum(features: Tensor, gates: Tensor) -> Tensor:
    """Equation 8: Σ_j g_j · MHSA_j, features [B, K, N, E] and gates [K] or [K, H] → [B, N, E]."""
    gates = gates[:, None] if gates.dim() == 1 else gates
    per_channel = gates.repeat_interleave(features.shape[-1] // gates.shape[1], dim=1)
    return (features * per_channel[:, None]).sum(1)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the images that have a label, [B, classes] and [B] → scalar; 0 where none has one."""
    total = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    return total / (labels != NO_LABEL).sum().clamp(min=1)


class LEViT(nn.Module):
    """Lifelong Expansible Vision Transformer: K experts, the last active, the others frozen.

    Every method but `training_loss` evaluates (running batch-norm statistics, mean codes or fixed noise) whatever
    `.training` says, so no prediction depends on the batch it is made in.

    Args:
        cfg: configuration; `cfg.seed` initialises the experts.

    Bad images raise `ValueError` (shape, device) or `TypeError` (dtype) naming what was expected and what came.
    """

    def __init__(self, cfg: LEViTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.experts = nn.ModuleList([Expert.create(cfg, 0)])
        self.router = Router.create(cfg)

    @property
    def num_experts(self) -> int:
        """K, the active expert included."""
        return len(self.experts)

    @property
    def active(self) -> Expert:
        """The expert in training."""
        return self.experts[-1]

    @property
    def weight(self) -> Tensor:
        """One of the parameters, for the dtype and device of them all."""
        return self.active.head.out.weight

    def add_expert(self) -> None:
        """Freeze the active expert for good and append a fresh one, which becomes the active one."""
        self.active.freeze()
        self.experts.append(Expert.create(self.cfg, self.num_experts, like=self.weight))
        if self.router is not None:
            self.router.add_expert()

    def gates(self, k: int) -> Tensor:
        """Equation 7: g of expert k over the experts that it gates, [n] or [n, H]; constant 1/n where gating is fixed.

        n is k + 1, or k where fusion is `concat`: the own features are not gated then. Without transfer there are no
        gates, n = 0.
        """
        count = 0 if self.cfg.gating == "none" else k + 1 if self.cfg.fusion == "sum" else k
        if self.cfg.gating == "learned" and count:
            return torch.softmax(self.experts[k].gates, dim=0)
        return self.weight.new_full((count,), 1 / max(count, 1))

    def features(self, images: Tensor) -> Tensor:
        """Every expert's MHSA_k(z_k), each with its own patch embedding: [B, C, S, S] → [B, K, N, E]."""
        images = self.check_images(images)
        return torch.stack([features(expert, images, self.cfg) for expert in self.experts], dim=1)

    def forward_expert(self, images: Tensor, k: int) -> Tensor:
        """Equations 1-9 for expert k (0-based): [B, C, S, S] → logits [B, num_classes]."""
        self.check_expert(k)
        images = self.check_images(images)
        evaluated = torch.stack([features(expert, images, self.cfg) for expert in self.experts[: k + 1]], dim=1)
        return self.experts[k].head(self.fuse(evaluated))

    def fuse(self, evaluated: Tensor) -> Tensor:
        """Equation 8 for expert k, the last whose features are given: [B, k + 1, N, E] → M̃ [B, N, E or 2·E]."""
        own, gates = evaluated[:, -1], self.gates(evaluated.shape[1] - 1)
        if self.cfg.gating == "none":
            return own
        if self.cfg.fusion == "concat":
            return torch.cat([own, gated_sum(evaluated[:, :-1], gates)], dim=-1)
        return gated_sum(evaluated, gates)

    def elbo_loss(self, images: Tensor) -> Tensor:
        """VAE loss of every image under every expert, [B, C, S, S] → [B, K].

        At the mean code, or averaged over `cfg.route_samples` codes with fixed seeded ε [D].
        """
        images = self.check_images(images)
        noise = self._route_noise()
        noise = None if noise is None else noise[:, None]
        return torch.stack([self._vae_loss(k, images, noise) for k in range(self.num_experts)], dim=1)

    def route(self, images: Tensor) -> Tensor:
        """k*(x) per sample, [B, C, S, S] → [B] int64: argmin_k VAE loss_k(x) [P], or as `levit.routing` has it."""
        images = self.check_images(images)
        return self._choose(images)

    def observe(self, images: Tensor, labels: Tensor, expert: int) -> None:
        """Let routing and calibration take in a batch of the stream, before `expert` learns from it.

        Nothing that the published rule does without (`cfg.routing`, `cfg.calibration`) is computed or kept.

        Args:
            images: [b, C, S, S].
            labels: [b] int64; `NO_LABEL` (-1) where there is none.
            expert: 0-based, who will be trained on them.
        """
        if self.router is not None:
            self.router.observe(self, self.check_images(images), labels, expert)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Prediction:
        """Label, expert, confidence and whether any expert knows such images: [B, C, S, S] → [B] each.

        The confidence is p(k* | x)·p(label | x, k*), both fitted on images that the model had not learned from when it
        was asked about them (`levit.examples`). Without `cfg.calibration` it is the plain softmax value of the label,
        and every image counts as known.
        """
        images = self.check_images(images)
        if self.router is None or not self.cfg.calibration:
            logits, routes = self.answer(images)
            confidence, label = logits.softmax(1).max(1)
            return Prediction(label, routes, confidence, torch.ones_like(label, dtype=torch.bool))
        losses, class_logits = self.elbo_loss(images), self.router.class_logits(images)
        scores, plan = self.router.scores(images, lambda _: losses, class_logits), self.router.plan()
        routes = scores.argmax(1)
        logits = self.router.with_prior(self.apply_experts(images, routes), class_logits, routes)
        label = logits.argmax(1)  # of the logits: where they were of no use so far, the sharpness is 0
        confidence = (plan.sharpness * logits).softmax(1).gather(1, label[:, None])[:, 0]
        if plan.fitted:
            confidence = confidence * scores.softmax(1).amax(1)
        return Prediction(label, routes, confidence, (losses.log() <= plan.known_limits).any(1))

    def forward(self, images: Tensor) -> Tensor:
        """Equation 9, routed per sample: expert k*(x) with its own gates; [B, C, S, S] → logits [B, num_classes].

        With `cfg.prior` the label's log-probabilities up to a constant, −∞ for classes the expert never saw.
        """
        return self.answer(images)[0]

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` and `route` say of images [B, C, S, S], at the cost of one: logits [B, num_classes], [B]."""
        images = self.check_images(images)
        if self.router is None or self.router.plan().prior is None:
            routes = self.route(images)
            return self.apply_experts(images, routes), routes
        class_logits = self.router.class_logits(images)  # once, for the choice and for the label
        routes = self._choose(images, class_logits)
        return self.router.with_prior(self.apply_experts(images, routes), class_logits, routes), routes

    def apply_experts(self, images: Tensor, routes: Tensor) -> Tensor:
        """Equation 9 with each image's expert given: [B, C, S, S] and [B] → logits [B, num_classes]."""
        evaluated = self.features(images)
        logits = evaluated.new_empty(len(images), self.cfg.num_classes)
        for k in range(self.num_experts):
            rows = (routes == k).nonzero().squeeze(1)
            if len(rows):
                logits[rows] = self.experts[k].head(self.fuse(evaluated[rows, : k + 1]))
        return logits

    def expansion_distances(
        self, images: Tensor, generator: torch.Generator | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Equation 6: D_j = mean over images of ‖z_j(x) − z_active(x)‖₂ of sampled codes, for each frozen j.

        Args:
            images: [M, C, S, S], the memory.
            generator: draws the active VAE's ε.
            noise: ε of the frozen VAEs, [K-1, M, L]; None takes the images as positions 0..M-1 of the stream.

        Returns:
            [K-1].
        """
        images = self.check_images(images)
        if noise is None:
            noise = self.frozen_noise(torch.arange(len(images), device=images.device))
        query = self._active_codes(images, generator)
        distances = []
        for expert, epsilon in zip(self.experts[:-1], noise, strict=True):
            mu, log_sigma = expert.vae.encode(images)
            distances.append((mu + log_sigma.exp() * epsilon - query).norm(dim=1).mean())
        return torch.stack(distances) if distances else query.new_empty(0)

    def reconstruction_errors(self, images: Tensor) -> Tensor:
        """Rule `energy`: every frozen VAE's reconstruction error of every image, [M, C, S, S] → [K-1, M]."""
        images = self.check_images(images)
        errors = [expert.vae.reconstruction_error(images) for expert in self.experts[:-1]]
        return torch.stack(errors) if errors else images.new_empty(0, len(images))

    @torch.no_grad()
    def surprise(self, images: Tensor, labels: Tensor, k: int) -> Surprise:
        """What expert k does not expect of a batch: images [B, C, S, S], labels [B], -1 where there is none; B ≥ 1.

        The VAE loss is taken at the mean code, or at one sampled code where routing samples (`route_samples`).
        """
        noise = self._route_noise()
        vae = self._vae_loss(k, images, None if noise is None else noise[:1, None]).log().mean()
        labelled = labels != NO_LABEL
        if not labelled.any():
            return Surprise(vae.item(), None)
        logits = self.forward_expert(images[labelled], k)
        return Surprise(vae.item(), label_surprise(logits, labels[labelled]))

    def training_loss(
        self,
        images: Tensor,
        labels: Tensor,
        cache: Any = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Cross-entropy + VAE loss of the active expert, batch statistics and sampled codes: a scalar.

        Gradients reach the active expert, its gates and its head only. Running batch-norm statistics move.

        Args:
            images: [B, C, S, S], B ≥ 2.
            labels: [B] int64; `NO_LABEL` (-1) where there is none, such an image trains the VAE only.
            cache: stored features of the frozen experts (`levit.LEViT`); the reference recomputes and ignores it.
            generator: draws the VAE's ε.
            noise: ε itself, [B, L] (`training_noise`); nothing is drawn then.
        """
        images = self.check_training_batch(images, labels)
        own = features(self.active, images, self.cfg, batch_statistics=True)
        with torch.no_grad():
            frozen = [features(expert, images, self.cfg) for expert in self.experts[:-1]]
        logits = self.active.head(self.fuse(torch.stack([*frozen, own], dim=1)), batch_statistics=True)
        return classification_loss(logits, labels) + self._vae_training_loss(images, generator, noise)

    def set_gradients(
        self,
        images: Tensor,
        labels: Tensor,
        cache: Any = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The value of `training_loss`, same arguments; its gradients replace those of the active expert."""
        loss = self.training_loss(images, labels, cache, generator, noise)
        for parameter in self.active.parameters():
            parameter.grad = None
        loss.backward()
        return loss.detach()

    def training_noise(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """ε of the VAE's codes of `count` images, as `training_loss` draws it: [count, L]."""
        return normal((count, self.cfg.latent_dim), self.weight, generator)

    def new_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """Adam [P] over the active expert's parameters, its gates and its head."""
        return torch.optim.Adam(self.active.parameters(), lr=learning_rate)

    def new_cache(self, memory: Memory) -> MemoryCache | KnowledgeCache:
        """What the memory keeps beside each image for the present frozen experts."""
        return MemoryCache(self, memory)

    def frozen_noise(self, positions: Tensor) -> Tensor:
        """ε of every frozen VAE's code for images at these positions of the stream: [M] int64 → [K-1, M, L]."""
        frozen = torch.arange(self.num_experts - 1, device=positions.device)
        return position_noise(self.cfg.seed, frozen, positions, self.cfg.latent_dim, self.weight.dtype)

    def check_images(self, images: Tensor) -> Tensor:
        """The images in the model's dtype ([0, 255] uint8 becomes [0, 1]), or `TypeError`/`ValueError`."""
        return check_images(images, self.cfg, self.weight)

    def check_labels(self, images: Tensor, labels: Tensor) -> None:
        """`TypeError` or `ValueError` unless labels are [B] int64 on the images' device (values: `Learner`)."""
        check_labels(images, labels)

    def check_training_batch(self, images: Tensor, labels: Tensor) -> Tensor:
        """`check_images` and `check_labels`, and at least two images."""
        images = self.check_images(images)
        self.check_labels(images, labels)
        if len(images) < 2:
            raise ValueError(f"images: expected at least 2 (batch statistics), got {len(images)}")
        return images

    def check_expert(self, k: int) -> None:
        """`ValueError` unless k is an expert's number."""
        if not 0 <= k < self.num_experts:
            raise ValueError(f"k: expected an expert from 0 to {self.num_experts - 1}, got {k}")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state with any number of experts: the model grows or shrinks to the saved K.

        A state of another configuration raises `ValueError` naming the first key that differs; nothing changes then.
        """
        numbers = {int(m[1]) for key in state_dict if (m := re.match(r"experts\.(\d+)\.", key))}
        if not numbers or numbers != set(range(len(numbers))):
            raise ValueError(f"state_dict: expected keys of experts 0, 1, …, got experts {sorted(numbers)}")
        kept = min(len(numbers), self.num_experts)
        like = self.weight
        experts = nn.ModuleList([Expert.create(self.cfg, k, like) for k in range(kept, len(numbers))])
        experts = nn.ModuleList([*self.experts[:kept], *experts])
        router = Router.create(self.cfg, len(numbers), state_dict)
        shaped = nn.ModuleDict({"experts": experts} | ({} if router is None else {"router": router}))
        self._check_state(shaped.state_dict(), state_dict, strict)
        self.experts = experts
        self.router = None if router is None else router.to(like.device, like.dtype)
        for expert in experts[:-1]:
            expert.freeze()
        self.active.requires_grad_(True)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save(self, path: str | Path) -> None:
        """Write configuration and weights to a file (`levit.export.save_model`)."""
        save_model(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """The model that `save` wrote, fused or reference as the class says; `ValueError` where the file is no such."""
        return load_model(cls, path, device)

    def __accelerate__(self) -> None:
        """Become `levit.LEViT` in place (`levit_kernels.accelerate`); parameters keep their identity."""
        from levit.model import LEViT as Fused

        Fused.adopt(self)

    @staticmethod
    def _check_state(own: Mapping[str, Tensor], given: Mapping[str, Any], strict: bool) -> None:
        for key, value in own.items():
            if key not in given:
                if strict:
                    raise ValueError(f"state_dict: {key} is missing")
            elif given[key].shape != value.shape:
                raise ValueError(f"state_dict: {key}: expected {list(value.shape)}, got {list(given[key].shape)}")
        extra = sorted(set(given) - set(own))
        if extra and strict:
            raise ValueError(f"state_dict: {extra[0]} is not a key of this model")

    def _active_codes(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """A fresh sample of the active VAE's codes, [M, C, S, S] → [M, L]."""
        mu, log_sigma = self.active.vae.encode(images)
        return mu + log_sigma.exp() * normal(mu.shape, mu, generator)

    def _vae_training_loss(self, images: Tensor, generator: torch.Generator | None, noise: Tensor | None) -> Tensor:
        if noise is None:
            noise = self.training_noise(len(images), generator)
        return self._mean_vae_loss(images, noise)

    def _mean_vae_loss(self, images: Tensor, noise: Tensor) -> Tensor:
        return self._vae_loss(self.num_experts - 1, images, noise).mean()

    def _vae_loss(self, k: int, images: Tensor, noise: Tensor | None) -> Tensor:
        return self.experts[k].vae.loss(images, noise)

    def _choose(self, images: Tensor, class_logits: Tensor | None = None) -> Tensor:
        """`route`, where the shared space's class logits [B, classes] may be known already."""
        if self.router is None:
            return self.elbo_loss(images).argmin(dim=1)
        return self.router.route(images, self.elbo_loss, class_logits)

    def _route_noise(self) -> Tensor | None:
        """The fixed ε [S, L] of sampled routing; None where the mean code is taken."""
        if not self.cfg.route_samples:
            return None
        like = self.weight
        return fixed_noise(self.cfg.seed, self.cfg.route_samples, self.cfg.latent_dim, like.dtype, like.device)


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers; a CPU generator serves every device, so that runs agree across devices."""
    device = like.device if generator is None else generator.device
    return to_device(torch.randn(shape, generator=generator, device=device, dtype=like.dtype), like.device)
