"""KnowledgeBase: the frozen experts, stacked along K the way the kernels want them.

The raw parameters of each expert stay the truth. What is kept here is derived: batch norm folded into the embedding,
weights of all experts side by side. It is never saved, and it is rebuilt row by row when its source has changed (a
load, `.to()`, an in-place edit; an edit through `.data` goes unseen, as it does for autograd).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from levit.expert import Expert


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


def vae_weights(expert: Expert) -> VAEWeights:
    """One expert's VAE weights, K = 1: views of its parameters."""
    return _vae_view([row[None] for row in _vae_rows(expert)])


class KnowledgeBase:
    """The frozen experts of one model, packed. Storage doubles when it is full, so freezing costs amortised O(1)."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self._storage: list[Tensor] = []
        self._sources: list[_Source] = []

    def attention(self, experts: Sequence[Expert]) -> AttentionWeights:
        """Attention weights of these experts, the first len(experts) of the model."""
        return _attention_view(self._rows(experts)[:4], self.num_heads)

    def vae(self, experts: Sequence[Expert]) -> VAEWeights:
        """VAE weights of these experts, the first len(experts) of the model."""
        return _vae_view(self._rows(experts)[4:])

    @torch.compiler.disable
    def _rows(self, experts: Sequence[Expert]) -> list[Tensor]:
        for k, expert in enumerate(experts):
            if k >= len(self._sources) or not self._sources[k].is_current(expert):
                with torch.no_grad():
                    self._write(k, expert)
        return [stack[: len(experts)] for stack in self._storage]

    def _write(self, k: int, expert: Expert) -> None:
        rows = [*_attention_rows(expert), *_vae_rows(expert)]
        kept = self._storage[0] if self._storage else None
        if kept is None or k >= len(kept) or kept.dtype != rows[0].dtype or kept.device != rows[0].device:
            self._make_room(k, rows)
        for stack, row in zip(self._storage, rows, strict=True):
            stack[k] = row
        self._sources[k : k + 1] = [_Source(expert)]

    def _make_room(self, k: int, rows: list[Tensor]) -> None:
        """New storage with room for row k, of the dtype and on the device of `rows`; rows before k are kept."""
        capacity = len(self._storage[0]) if self._storage else 0
        if k >= capacity:
            capacity = max(4, 2 * capacity)
        grown = [row.new_empty(capacity, *row.shape) for row in rows]
        for new, old in zip(grown, self._storage, strict=False):
            new[:k] = old[:k]
        self._storage = grown
        del self._sources[k:]


class _Source:
    """Which version of an expert's tensors a packed row was made from."""

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        modules = [expert.embed, expert.norm, expert.qkv, *expert.vae.modules()]
        self._groups = [group for module in modules for group in (module._parameters, module._buffers) if group]
        self._stamp = self._read()

    def is_current(self, expert: Expert) -> bool:
        return expert is self._expert and self._stamp == self._read()

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


def _vae_rows(expert: Expert) -> list[Tensor]:
    """Weight [out, in] and bias [out] of every layer, encoder first."""
    vae = expert.vae
    layers = [*vae.encoder, vae.mu, vae.log_sigma, *vae.decoder]
    return [parameter for layer in layers for parameter in (layer.weight, layer.bias)]


def _attention_view(stacks: list[Tensor], num_heads: int) -> AttentionWeights:
    w_embed, b_embed, w_qkv, b_qkv = stacks
    experts, _, width = w_qkv.shape
    w_qkv = w_qkv.view(experts, 3, num_heads, -1, width).permute(0, 4, 1, 2, 3)
    return AttentionWeights(w_embed.transpose(1, 2), b_embed, w_qkv, b_qkv.view(experts, 3, num_heads, -1))


def _vae_view(stacks: list[Tensor]) -> VAEWeights:
    views = [stack.transpose(1, 2) if stack.dim() == 3 else stack for stack in stacks]
    return VAEWeights(views[:8], views[8:])
