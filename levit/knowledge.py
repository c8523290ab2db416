"""KnowledgeBase: the frozen experts, stacked along K the way the kernels want them.

The raw parameters of each expert stay the truth. What is kept here is derived: batch norm folded into the embedding,
weights of all experts side by side. It is never saved, and it is rebuilt row by row when its source has changed (a
load, `.to()`, an in-place edit; an edit through `.data` goes unseen, as it does for autograd).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from levit.expert import Expert
from levit.folding import fold_batch_norm
from levit_kernels.folded_attention import FoldedWeights, folded_scores, folding_pays
from levit_kernels.huge_pages import huge_pages


class AttentionWeights(NamedTuple):
    """Weights of `levit_kernels.expert_attention` for K experts."""

    w_embed: Tensor
    """[K, P²C, Q], batch norm folded in."""
    b_embed: Tensor
    """[K, Q]"""
    w_qkv: Tensor
    """[K, Q, 3, H, d]"""
    b_qkv: Tensor
    """[K, 3, H, d]"""


class VAEWeights(NamedTuple):
    """Weights of `levit_kernels.elbo_loss` for K experts: matrices are [K, in, out], biases [K, out]."""

    encoder: list[Tensor]
    """w1, b1, w2, b2, w_mu, b_mu, w_log_sigma, b_log_sigma"""
    decoder: list[Tensor]
    """w1, b1, w2, b2, w3, b3"""


def attention_weights(expert: Expert, num_heads: int) -> AttentionWeights:
    """One expert's attention weights, K = 1, running batch-norm statistics folded in; differentiable."""
    return _attention_view([row[None] for row in _attention_rows(expert)], num_heads)


def training_weights(expert: Expert, patches: Tensor, num_heads: int) -> AttentionWeights:
    """As `attention_weights`, with the batch statistics of patches [B, N, P²C]; the running ones move.

    The values' bias, which shifts the features of all images alike, gets no gradient where the head takes its batch
    mean out again: the exact one is zero, and Adam would scale the rounding errors in its place up to full steps.
    """
    folded = fold_batch_norm(expert.embed, expert.norm, patches.flatten(0, 1))
    bias = expert.qkv.bias
    if len(expert.head.norms):
        scores, values = bias.tensor_split([2 * len(bias) // 3])
        bias = torch.cat([scores, values.detach()])
    return _attention_view([row[None] for row in (*folded, expert.qkv.weight, bias)], num_heads)


def vae_weights(expert: Expert) -> VAEWeights:
    """One expert's VAE weights, K = 1: views of its parameters."""
    return _vae_view([row[None] for row in vae_parameters(expert)])


class KnowledgeBase:
    """The frozen experts of one model, packed. Storage doubles when it is full, so freezing costs amortised O(1).

    Args:
        num_heads: H.
        dtype: to keep what prediction reads in, attention and scoring VAEs; None, the parameters' own.
    """

    def __init__(self, num_heads: int, dtype: torch.dtype | None = None) -> None:
        self.num_heads = num_heads
        self._attention = _Stack(_attention_rows, _attention_sources, dtype)
        self._folded = _Stack(partial(_folded_rows, num_heads), _folded_sources, dtype)
        self._vae = _Stack(vae_parameters, _vae_sources)
        self._scoring_vae = self._vae if dtype is None else _Stack(vae_parameters, _vae_sources, dtype)

    def attention(self, experts: Sequence[Expert]) -> AttentionWeights:
        """Attention weights of these experts, the first len(experts) of the model."""
        return _attention_view(self._attention.rows(experts), self.num_heads)

    def folded_attention(self, experts: Sequence[Expert]) -> FoldedWeights | None:
        """The same with queries and keys multiplied; None where that saves nothing or no kernel makes use of it."""
        weights = self.attention(experts)
        if not folding_pays(weights.w_qkv):
            return None
        width = weights.w_qkv.shape[1]
        w_scores, b_scores = self._folded.rows(experts)
        w_scores = w_scores.view(len(experts), self.num_heads, width, width).permute(0, 3, 1, 2)
        b_scores = b_scores.view(len(experts), self.num_heads, width)
        values = weights.w_qkv[:, :, 2], weights.b_qkv[:, 2]
        return FoldedWeights(weights.w_embed, weights.b_embed, w_scores, b_scores, *values)

    def vae(self, experts: Sequence[Expert]) -> VAEWeights:
        """VAE weights of these experts, the first len(experts) of the model."""
        return _vae_view(self._vae.rows(experts))

    def scoring_vae(self, experts: Sequence[Expert], only: int | None = None) -> VAEWeights:
        """The same to route by; `only` of one expert, K = 1."""
        rows = self._scoring_vae.rows(experts)
        return _vae_view(rows if only is None else [stack[only : only + 1] for stack in rows])


class _Stack:
    """Tensors derived from each expert, expert after expert in one storage; up to date whenever they are asked for.

    Args:
        derive: an expert's tensors, from its parameters and buffers.
        sources: the modules whose parameters and buffers these are.
        dtype: what they are rounded to; None, as they are derived.
    """

    def __init__(
        self,
        derive: Callable[[Expert], list[Tensor]],
        sources: Callable[[Expert], list[nn.Module]],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.storage: list[Tensor] = []
        self._derive = derive
        self._sources = sources
        self._dtype = dtype
        self._stamps: list[_Stamp] = []

    @torch.compiler.disable
    def rows(self, experts: Sequence[Expert]) -> list[Tensor]:
        """The derived tensors of experts 0..K-1, [K, ...] each."""
        for k, expert in enumerate(experts):
            if k >= len(self._stamps) or not self._stamps[k].is_current(expert):
                with torch.no_grad():
                    self._write(k, expert)
        return [stack[: len(experts)] for stack in self.storage]

    def _write(self, k: int, expert: Expert) -> None:
        rows = [row.to(self._dtype or row.dtype) for row in self._derive(expert)]
        kept = self.storage[0] if self.storage else None
        if kept is None or k >= len(kept) or kept.dtype != rows[0].dtype or kept.device != rows[0].device:
            self._make_room(k, rows)
        for stack, row in zip(self.storage, rows, strict=True):
            stack[k] = row
        self._stamps[k : k + 1] = [_Stamp(expert, self._sources(expert))]

    def _make_room(self, k: int, rows: list[Tensor]) -> None:
        """New storage with room for row k, of the dtype and on the device of `rows`; rows before k are kept."""
        capacity = len(self.storage[0]) if self.storage else 0
        if k >= capacity:
            capacity = max(4, 2 * capacity)
        grown = [row.new_empty(capacity, *row.shape) for row in rows]
        for stack in grown:
            huge_pages(stack)  # one image reads all of a large stack for little arithmetic
        for new, old in zip(grown, self.storage, strict=False):
            new[:k] = old[:k]
        self.storage = grown
        del self._stamps[k:]


class _Stamp:
    """Which version of an expert's tensors a row was derived from."""

    def __init__(self, expert: Expert, modules: list[nn.Module]) -> None:
        self._expert = expert
        self._groups = [group for module in modules for group in (module._parameters, module._buffers) if group]
        self._read_then = self._read()

    def is_current(self, expert: Expert) -> bool:
        return expert is self._expert and self._read_then == self._read()

    def _read(self) -> list[int]:
        """Address and version of every tensor: a move changes the one, an edit raises the other."""
        stamp = []
        for group in self._groups:
            for tensor in group.values():
                stamp.append(tensor.data_ptr())
                stamp.append(0 if tensor.is_inference() else tensor._version)
        return stamp


def _attention_rows(expert: Expert) -> list[Tensor]:
    """Folded embedding [Q, P²C] and [Q], then the maps of equation 3 [3·H·d, Q] and [3·H·d]."""
    norm = expert.norm
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    bias = (expert.embed.bias - norm.running_mean) * scale + norm.bias
    return [expert.embed.weight * scale[:, None], bias, expert.qkv.weight, expert.qkv.bias]


def _attention_sources(expert: Expert) -> list[nn.Module]:
    return [expert.embed, expert.norm, expert.qkv]


def _folded_rows(num_heads: int, expert: Expert) -> list[Tensor]:
    """Of every head Wk Wqᵀ, [H·Q, Q] as nn.Linear keeps weights, and bq Wkᵀ [H·Q]."""
    *_, w_qkv, b_qkv = _attention_view([row[None] for row in _attention_rows(expert)], num_heads)
    w_scores, b_scores = folded_scores(w_qkv, b_qkv)
    return [w_scores[0].permute(1, 2, 0).flatten(0, 1), b_scores[0].flatten()]


def _folded_sources(expert: Expert) -> list[nn.Module]:
    return [expert.qkv]


def vae_parameters(expert: Expert) -> list[Tensor]:
    """Weight [out, in] and bias [out] of every layer, encoder first."""
    vae = expert.vae
    layers = [*vae.encoder, vae.mu, vae.log_sigma, *vae.decoder]
    return [parameter for layer in layers for parameter in (layer.weight, layer.bias)]


def _vae_sources(expert: Expert) -> list[nn.Module]:
    return list(expert.vae.modules())


def _attention_view(stacks: list[Tensor], num_heads: int) -> AttentionWeights:
    w_embed, b_embed, w_qkv, b_qkv = stacks
    experts, _, width = w_qkv.shape
    w_qkv = w_qkv.view(experts, 3, num_heads, -1, width).permute(0, 4, 1, 2, 3)
    return AttentionWeights(w_embed.transpose(1, 2), b_embed, w_qkv, b_qkv.view(experts, 3, num_heads, -1))


def _vae_view(stacks: list[Tensor]) -> VAEWeights:
    views = [stack.transpose(1, 2) if stack.dim() == 3 else stack for stack in stacks]
    return VAEWeights(views[:8], views[8:])
