"""Gradients of expert_attention, by hand: expert by expert, so that only one expert's activations exist at a time."""

from __future__ import annotations

import math

import torch

from .. import gates as gating
from .._check import at_least_float32
from .expert_attention import Weights, attend, project
from .linear import matmul

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}


def expert_attention_backward(
    grad: torch.Tensor,
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
    saved: list[torch.Tensor],
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of the tensor arguments that `needs` names, in their order. `saved`: see expert_attention_train."""
    batch, experts, heads = len(patches), len(w_embed), w_qkv.shape[3]
    weights = (w_embed, b_embed, w_qkv, b_qkv)
    sums = _Sums(patches, weights, needs)
    if needs[5]:
        gate_grads = grad.new_zeros(batch, experts, heads, dtype=at_least_float32(grad.dtype))
    per_head = None if gates is None else gating.expand(gates).expand(-1, -1, heads)
    step = _images_per_chunk(patches, w_qkv)
    for k in range(experts):
        for start in range(0, batch, step):
            images = slice(start, min(start + step, batch))
            if saved:
                tokens, qkv, attention = saved[0][images], saved[1][images], saved[2][:, images]
            else:
                tokens, qkv = project(patches[images], weights, slice(k, k + 1), negative_slope)
                attention = None
            chunk_grad = (grad[k] if gates is None else grad)[images].unflatten(2, (heads, -1))
            grad_qkv = torch.empty_like(qkv) if any(needs[:5]) else None
            for h in range(heads):
                weight, upstream = attend(qkv, h) if attention is None else attention[h], chunk_grad[:, :, h]
                if needs[5]:
                    output = torch.bmm(weight, qkv[:, :, 2, h])
                    gate_grads[images, k, h] = (output * upstream).sum((1, 2), dtype=gate_grads.dtype)
                if grad_qkv is None:
                    continue
                if per_head is not None:
                    gate = per_head if len(per_head) == 1 else per_head[images]
                    upstream = upstream * gate[:, k, h, None, None]
                _head_backward(upstream.to(qkv.dtype), qkv, weight, h, grad_qkv)
            if grad_qkv is not None:
                sums.add(k, images, grad_qkv, tokens, negative_slope)
    grads = sums.results()
    return [*grads, gating.reduce_like(gate_grads, gates)] if needs[5] else grads


def _head_backward(
    grad: torch.Tensor, qkv: torch.Tensor, attention: torch.Tensor, head: int, grad_qkv: torch.Tensor
) -> None:
    """Writes one head's part of grad_qkv `[b,N,3,H,d]` from the gradient of its output `[b,N,d]`."""
    query, key, value = qkv[:, :, :, head].unbind(2)
    grad_attention = torch.bmm(grad, value.transpose(1, 2))
    grad_scores = torch._softmax_backward_data(grad_attention, attention, -1, attention.dtype)
    grad_scores = grad_scores.mul_(1 / math.sqrt(qkv.shape[-1]))
    grad_qkv[:, :, 0, head] = torch.bmm(grad_scores, key)
    grad_qkv[:, :, 1, head] = torch.bmm(grad_scores.transpose(1, 2), query)
    grad_qkv[:, :, 2, head] = torch.bmm(attention.transpose(1, 2), grad)


class _Sums:
    """Gradients of patches and weights, summed over chunks in float32 at least."""

    def __init__(self, patches: torch.Tensor, weights: Weights, needs: list[bool]) -> None:
        self.patches, self.weights, self.needs = patches, weights, needs[:5]
        dtype = at_least_float32(patches.dtype)
        tensors = (patches, *weights)
        self.totals = [
            x.new_zeros(x.shape, dtype=dtype) if need else None for x, need in zip(tensors, self.needs, strict=True)
        ]

    def add(self, k: int, images: slice, grad_qkv: torch.Tensor, tokens: torch.Tensor, negative_slope: float) -> None:
        w_embed, _, w_qkv, _ = self.weights
        by_patches, by_w_embed, by_b_embed, by_w_qkv, by_b_qkv = self.totals
        width = w_qkv.shape[1]
        grad_rows, token_rows = grad_qkv.view(-1, grad_qkv[0, 0].numel()), tokens.reshape(-1, width)
        if by_w_qkv is not None:
            by_w_qkv[k] += matmul(token_rows.t(), grad_rows).view_as(by_w_qkv[k])
        if by_b_qkv is not None:
            by_b_qkv[k] += grad_rows.sum(0, dtype=by_b_qkv.dtype).view_as(by_b_qkv[k])
        if not any(self.needs[:3]):
            return
        grad_tokens = matmul(grad_rows, w_qkv[k].reshape(width, -1).t())
        grad_embedded = torch.ops.aten.leaky_relu_backward(grad_tokens, token_rows, negative_slope, True)
        if by_w_embed is not None:
            rows = self.patches[images].reshape(-1, self.patches.shape[2])
            by_w_embed[k] += matmul(rows.t(), grad_embedded)
        if by_b_embed is not None:
            by_b_embed[k] += grad_embedded.sum(0, dtype=by_b_embed.dtype)
        if by_patches is not None:
            by_patches[images] += matmul(grad_embedded, w_embed[k].t()).view_as(by_patches[images])

    def results(self) -> list[torch.Tensor]:
        return [total.to(self.patches.dtype) for total in self.totals if total is not None]


def _images_per_chunk(patches: torch.Tensor, w_qkv: torch.Tensor) -> int:
    length = patches.shape[1]
    image_bytes = 2 * length * w_qkv[0, 0].numel() * patches.element_size()
    return max(1, CHUNK_BYTES[patches.device.type] // image_bytes)
