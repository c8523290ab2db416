"""levit.LEViT: the fused model. Same parameters, same state_dict, same numbers as `levit.reference.LEViT`, faster.

The frozen experts live packed in a `KnowledgeBase` and are evaluated together by the ops of `levit_kernels`; the active
expert, whose weights change at every step, stands on top of them.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from levit import reference
from levit.cache import CachedRows, KnowledgeCache, MemoryCache
from levit.config import LEViTConfig
from levit.conv_vae import conv_vae_loss
from levit.expert import NEGATIVE_SLOPE, Expert, move_running
from levit.gradients import set_kernel_gradients
from levit.knowledge import KnowledgeBase, attention_weights, training_weights, vae_parameters, vae_weights
from levit.memory import Memory
from levit.reference import classification_loss, features, normal, patches
from levit.routing import Prediction
from levit_kernels import dkf_fuse, elbo_loss, expansion_distances, expert_attention, latent_distance
from levit_kernels.backends.registry import has_kernel
from levit_kernels.expert_training import expert_training_loss
from levit_kernels.folded_attention import folded_attention
from levit_kernels.position_noise import position_noise
from levit_kernels.vae_codes import vae_codes
from levit_kernels.vae_training import vae_training_loss

CHUNK = 256
"""Images evaluated at a time, so that temporaries do not grow with the batch."""


class LEViT(reference.LEViT):
    """Drop-in for `levit.reference.LEViT`: the same interface, documented there."""

    def __init__(self, cfg: LEViTConfig) -> None:
        super().__init__(cfg)
        self._derive()

    @classmethod
    def adopt(cls, model: reference.LEViT) -> None:
        """Turn a reference model into a fused one in place (`levit_kernels.accelerate`)."""
        if type(model) is cls:
            return
        if type(model) is not reference.LEViT:
            raise TypeError(f"model: expected levit.reference.LEViT itself, got {type(model).__name__}")
        model.__class__ = cls
        model._derive()

    @property
    def frozen(self) -> list[Expert]:
        """Experts 0..K-2."""
        return list(self.experts)[:-1]

    @property
    def _attention_packs(self) -> bool:
        """Whether the experts are such as `levit_kernels.expert_attention` computes; else the reference does."""
        return self.cfg.expert == "vit" and not self.cfg.pos_embed and not self.cfg.out_proj

    def features(self, images: Tensor) -> Tensor:
        if not self._attention_packs:
            return super().features(images)
        parts = patches(self.check_images(images), self.cfg.patch_size)
        own = expert_attention(parts, *attention_weights(self.active, self.cfg.num_heads))
        if self.num_experts > 1:
            own = torch.cat([self._frozen_attention(parts, self.frozen).to(own.dtype), own])
        return own.transpose(0, 1)

    def forward_expert(self, images: Tensor, k: int) -> Tensor:
        if not self._attention_packs:
            return super().forward_expert(images, k)
        self.check_expert(k)
        parts = patches(self.check_images(images), self.cfg.patch_size)
        routes = torch.full((len(parts),), k, device=parts.device)
        return self._apply_heads(self._fuse_routed(parts, routes, [k]), routes, [k])

    def elbo_loss(self, images: Tensor) -> Tensor:
        if self.cfg.vae != "mlp":
            return super().elbo_loss(images)
        pixels = self.check_images(images).flatten(1)
        noise = self._route_noise()
        losses = elbo_loss(pixels, *vae_weights(self.active), self.cfg.beta, noise)
        if self.num_experts > 1:
            losses = torch.cat([self._frozen_elbo_loss(pixels, noise).to(losses.dtype), losses], 1)
        return losses

    def expert_elbo_loss(self, images: Tensor, k: int) -> Tensor:
        """Column k of `elbo_loss`, [B, C, S, S] → [B]."""
        noise = self._route_noise()
        if self.cfg.vae != "mlp":
            return self._vae_loss(k, images, None if noise is None else noise[:, None])
        if k < self.num_experts - 1:
            return self._frozen_elbo_loss(images.flatten(1), noise, k)[:, 0].to(images.dtype)
        return elbo_loss(images.flatten(1), *vae_weights(self.experts[k]), self.cfg.beta, noise)[:, 0]

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        answer = super().answer
        parts = [answer(chunk) for chunk in self.check_images(images).split(CHUNK)]
        logits, routes = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(routes)

    def predict(self, images: Tensor) -> Prediction:
        predict = super().predict
        parts = [predict(chunk) for chunk in self.check_images(images).split(CHUNK)]
        return Prediction(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def apply_experts(self, images: Tensor, routes: Tensor) -> Tensor:
        if not self._attention_packs:
            return super().apply_experts(images, routes)
        chosen = sorted(set(routes.tolist()))
        fused = self._fuse_routed(patches(images, self.cfg.patch_size), routes, chosen)
        return self._apply_heads(fused, routes, chosen)

    def expansion_distances(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> Tensor:
        """Equation 6; `codes` [K-1, M, L] are the frozen VAEs' stored codes of these images, in place of `noise`."""
        images = self.check_images(images)
        query = self._active_codes(images, generator)
        if codes is not None:
            return latent_distance(codes, query)
        if self.num_experts == 1:
            return query.new_empty(0)
        if noise is None:
            noise = self.frozen_noise(torch.arange(len(images), device=images.device))
        if self.cfg.vae != "mlp":
            return latent_distance(self.frozen_codes(images, noise), query)
        return expansion_distances(images.flatten(1), self.knowledge.vae(self.frozen).encoder, query, noise)

    def training_loss(
        self,
        images: Tensor,
        labels: Tensor,
        cache: CachedRows | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """As the reference's; `cache` holds stored features of the frozen experts for these images."""
        images = self.check_training_batch(images, labels)
        return self._classification_loss(images, labels, cache) + self._vae_training_loss(images, generator, noise)

    def set_gradients(
        self,
        images: Tensor,
        labels: Tensor,
        cache: CachedRows | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """As the reference's; without autograd where kernels give all gradients (`levit.gradients`). A subclass, whose
        loss may be another, always gets autograd's.
        """
        images = self.check_training_batch(images, labels)
        if noise is None:
            noise = self.training_noise(len(images), generator)
        ours = type(self) is LEViT and "training_loss" not in vars(self)
        loss = set_kernel_gradients(self, images, labels, cache, noise) if ours else None
        return super().set_gradients(images, labels, cache, noise=noise) if loss is None else loss

    def frozen_features(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """Features of the frozen experts alone: [B, C, S, S] → [B, K-1, N, E], written to `out` where it is given."""
        if not self._attention_packs:
            found = torch.stack([features(expert, images, self.cfg) for expert in self.frozen], dim=1)
        else:
            parts = patches(images, self.cfg.patch_size)
            place = out.transpose(0, 1) if out is not None and out.dtype == self._frozen_dtype else None
            found = self._frozen_attention(parts, self.frozen, out=place).transpose(0, 1)
            if place is not None:
                return out
        return found if out is None else out.copy_(found)

    def frozen_noise(self, positions: Tensor) -> Tensor:
        experts = torch.arange(self.num_experts - 1, device=positions.device)
        return position_noise(positions, experts, self.cfg.latent_dim, self.cfg.seed, self.weight.dtype)

    def frozen_codes(self, images: Tensor, noise: Tensor) -> Tensor:
        """Sampled codes μ + σε of the frozen VAEs: [B, C, S, S] and ε [K-1, B, L] → [K-1, B, L]."""
        if self.cfg.vae != "mlp":
            encoded = [expert.vae.encode(images) for expert in self.frozen]
            return torch.stack([mu + log_sigma.exp() * e for (mu, log_sigma), e in zip(encoded, noise, strict=True)])
        return vae_codes(images.flatten(1), self.knowledge.vae(self.frozen).encoder, noise, self._bf16)

    @property
    def trains_whole(self) -> bool:
        """Whether the classifier is such as `levit_kernels.expert_training` knows."""
        return self._attention_packs and (self.cfg.fusion == "sum" or self.cfg.gating == "none")

    def classifier_arguments(
        self, images: Tensor, labels: Tensor, transfer: tuple[Tensor | None, Tensor | None, Tensor | None]
    ) -> tuple:
        """As `levit_kernels.expert_training` takes them."""
        expert = self.active
        weights = expert.attention_parameters(), expert.head.training_weights()
        settings = NEGATIVE_SLOPE, expert.norm.eps, self._bf16
        return patches(images, self.cfg.patch_size), labels, *weights, self.cfg.num_heads, *transfer, *settings

    def vae_arguments(self, images: Tensor, noise: Tensor) -> tuple:
        """As `levit_kernels.vae_training` takes them."""
        return images.flatten(1), vae_parameters(self.active), self.cfg.beta, noise, self._bf16

    def move_statistics(self, images: Tensor, statistics: list[Tensor]) -> None:
        """The active expert's running statistics, after a batch of which `expert_training_loss` gave these."""
        expert, count = self.active, len(images)
        counts = [count * self.cfg.num_tokens] + [count] * len(expert.head.norms)
        move_running([(expert.embed, expert.norm), *expert.head.layers()], statistics, counts)

    def transfer(self, images: Tensor, cache: CachedRows | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The active expert's gates, None without transfer, and the frozen ones' features: stored [M, K-1, N, E] with
        an index [B], or recomputed; None where no expert is frozen.
        """
        if self.cfg.gating == "none":
            return None, None, None
        gates = self.gates(self.num_experts - 1)
        if self.num_experts == 1:
            return gates, None, None
        return (gates, *cache) if cache is not None else (gates, self.frozen_features(images), None)

    def _choose(self, images: Tensor, class_logits: Tensor | None = None) -> Tensor:
        if self.router is None:
            return super()._choose(images, class_logits)
        return self.router.route_sparingly(images, self.elbo_loss, self.expert_elbo_loss, class_logits)

    def _active_codes(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.cfg.vae != "mlp" or torch.is_grad_enabled():
            return super()._active_codes(images, generator)
        noise = normal((1, len(images), self.cfg.latent_dim), images, generator)
        return vae_codes(images.flatten(1), vae_weights(self.active).encoder, noise, self._bf16)[0]

    def _mean_vae_loss(self, images: Tensor, noise: Tensor) -> Tensor:
        if self.cfg.vae != "mlp":
            return super()._mean_vae_loss(images, noise)
        args = self.vae_arguments(images, noise)
        if not has_kernel("vae_training_loss", *args):
            return super()._mean_vae_loss(images, noise)
        return vae_training_loss(*args)

    def _vae_loss(self, k: int, images: Tensor, noise: Tensor | None) -> Tensor:
        if self.cfg.vae == "mlp" or not has_kernel("strided_conv", images):
            return super()._vae_loss(k, images, noise)
        return conv_vae_loss(self.experts[k].vae, images, noise)

    def new_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.active.parameters(), lr=learning_rate, fused=True)

    def new_cache(self, memory: Memory) -> MemoryCache | KnowledgeCache:
        return MemoryCache(self, memory) if self.cfg.cache == "off" else KnowledgeCache(self, memory)

    def tell_once(self, message: str) -> None:
        """Warn of something that stays true for the rest of this model's life."""
        if not self._told:
            self._told = True
            warnings.warn(message, stacklevel=2)

    def _derive(self) -> None:
        """What a fused model has beyond its parameters: nothing that would have to be saved."""
        self.knowledge = KnowledgeBase(self.cfg.num_heads, torch.bfloat16 if self._bf16 else None)
        self._told = False

    @property
    def _bf16(self) -> bool:
        return self.cfg.precision == "bf16"

    @property
    def _frozen_dtype(self) -> torch.dtype:
        """What the frozen experts' attention and routing losses are computed in."""
        return torch.bfloat16 if self._bf16 else self.weight.dtype

    def _frozen_elbo_loss(self, pixels: Tensor, noise: Tensor | None, only: int | None = None) -> Tensor:
        """`elbo_loss` of the frozen experts, or of `only` one: pixels [B, F] → [B, K-1 or 1]."""
        weights, dtype = self.knowledge.scoring_vae(self.frozen, only), self._frozen_dtype
        return elbo_loss(pixels.to(dtype), *weights, self.cfg.beta, None if noise is None else noise.to(dtype))

    def _frozen_attention(
        self, parts: Tensor, experts: list[Expert], gates: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """`expert_attention` of frozen experts, from folded weights where that saves and no gradient is asked for."""
        parts = parts.to(self._frozen_dtype)
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (parts, gates))
        if not learns and not torch.compiler.is_compiling():
            folded = self.knowledge.folded_attention(experts)
            if folded is not None:
                with torch.no_grad():
                    return folded_attention(parts, folded, gates, out=out)
        found = expert_attention(parts, *self.knowledge.attention(experts), gates=gates)
        return found if out is None else out.copy_(found)

    def _fuse_routed(self, parts: Tensor, routes: Tensor, chosen: list[int]) -> Tensor:
        """Equation 8 for images routed to the experts in `chosen`; experts beyond an image's own are not evaluated."""
        own_only = self.cfg.gating == "none"
        table = parts.new_zeros(self.num_experts, self.num_experts, 1 if own_only else self.cfg.gates_per_expert)
        for k in chosen if not own_only else ():
            gates = self.gates(k)
            if len(gates):
                table[k, : len(gates)] = gates.view(len(gates), -1)
        if not own_only and self.cfg.fusion == "sum":
            return self._mix(parts, routes, chosen, table)
        own = torch.eye(self.num_experts, dtype=parts.dtype, device=parts.device)[:, :, None]
        fused = self._mix(parts, routes, chosen, own)
        return fused if own_only else torch.cat([fused, self._mix(parts, routes, chosen, table)], dim=-1)

    def _mix(self, parts: Tensor, routes: Tensor, chosen: list[int], table: Tensor) -> Tensor:
        """Σ_j table[route, j] · MHSA_j for every image, table [K, K, 1 or H]: [B, N, P²C] → [B, N, E]."""
        last = self.num_experts - 1
        needed = min(max(chosen, default=-1) + 1, last)
        gates = table[routes]
        if needed:
            mixed = self._frozen_attention(parts, self.frozen[:needed], gates[:, :needed])
        else:
            mixed = parts.new_zeros(*parts.shape[:2], self.cfg.feature_dim)
        if last not in chosen or not table[last, last].any():
            return mixed
        rows = (routes == last).nonzero().squeeze(1)
        own = attention_weights(self.active, self.cfg.num_heads)
        return mixed.index_add(0, rows, expert_attention(parts[rows], *own, gates=gates[rows, last:]))

    def _apply_heads(self, fused: Tensor, routes: Tensor, chosen: list[int]) -> Tensor:
        """Equation 9: each image through the head of its own expert."""
        logits = fused.new_empty(len(fused), self.cfg.num_classes)
        for k in chosen:
            rows = (routes == k).nonzero().squeeze(1)
            logits[rows] = self.experts[k].head(fused[rows])
        return logits

    def _classification_loss(self, images: Tensor, labels: Tensor, cache: CachedRows | None) -> Tensor:
        """Cross-entropy of the active expert in training: by one kernel, or the head's and an op for every equation."""
        transfer = self.transfer(images, cache)
        cast = torch.is_autocast_enabled(images.device.type)
        if self.trains_whole and not cast:
            args = self.classifier_arguments(images, labels, transfer)
            if has_kernel("expert_training_loss", *args):
                loss, *statistics = expert_training_loss(*args)
                self.move_statistics(images, statistics)
                return loss
        fused, head = self._fuse_training(images, *transfer), self.active.head
        cast = torch.is_autocast_enabled(images.device.type)
        if (
            self._attention_packs
            and not cast
            and has_kernel("head_training_loss", fused, labels, head.training_weights())
        ):
            return head.training_loss(fused, labels, self._bf16)
        return classification_loss(head(fused, batch_statistics=True), labels)

    def _fuse_training(
        self, images: Tensor, gates: Tensor | None, frozen: Tensor | None, index: Tensor | None
    ) -> Tensor:
        """Equation 8 in training: the active expert's features and the gated frozen ones', as `transfer` has them."""
        if gates is None:
            return self._training_features(images, None)
        own_gate = None
        if self.cfg.fusion == "sum":
            gates, own_gate = gates.split([len(gates) - 1, 1])
        own = self._training_features(images, own_gate)
        if frozen is None:
            return own if self.cfg.fusion == "sum" else torch.cat([own, torch.zeros_like(own)], dim=-1)
        transferred = dkf_fuse(frozen, gates, index)
        return own + transferred if self.cfg.fusion == "sum" else torch.cat([own, transferred], dim=-1)

    def _training_features(self, images: Tensor, gate: Tensor | None) -> Tensor:
        """The active expert's features under batch statistics, times its gate [1] or [1, H]: → [B, N, E]."""
        if self._attention_packs:
            parts = patches(images, self.cfg.patch_size)
            own = expert_attention(parts, *training_weights(self.active, parts, self.cfg.num_heads), gate)
            return own[0] if gate is None else own
        own = features(self.active, images, self.cfg, batch_statistics=True)
        return own if gate is None else (own.unflatten(-1, (gate.numel(), -1)) * gate.view(-1, 1)).flatten(-2)
