"""The references of the op files as a backend: slow, float64-capable, gradients by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey

from .. import _vae
from ..batch_norm_fold import batch_norm_fold_backward_composed, batch_norm_fold_composed
from ..dkf_fuse import dkf_fuse_reference
from ..elbo_loss import elbo_loss_reference
from ..expansion_distances import expansion_distances_reference
from ..expert_attention import expert_attention_reference, reference_stages
from ..expert_training import expert_training_loss_reference
from ..folded_attention import folded_attention_reference
from ..gates import gated_sum
from ..head_training import head_training_loss_reference
from ..latent_distance import latent_distance_reference
from ..position_noise import position_noise_reference
from ..strided_conv import strided_conv_reference, transposed_conv_reference
from ..task_attention import task_attention_reference
from ..vae_codes import vae_codes_reference
from ..vae_training import vae_training_loss_reference
from .registry import Backend

_KEYS = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.ADInplaceOrView)


def _gradients(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, tensors: list, needs: list[bool]
) -> list[torch.Tensor]:
    """Gradients of `function(*tensors)` for the tensors that `needs` names.

    This runs inside a kernel, below autograd, where the dispatcher would record nothing: its keys are let in again.
    """
    guard = torch._C._SetExcludeDispatchKeyGuard
    with torch.enable_grad(), guard(_KEYS[0], False), guard(_KEYS[1], False), guard(_KEYS[2], False):
        tensors = [x.detach().requires_grad_() if need else x for x, need in zip(tensors, needs, strict=True)]
        leaves = [x for x, need in zip(tensors, needs, strict=True) if need]
        grads = torch.autograd.grad(function(*tensors), leaves, grad, materialize_grads=True)
    return [g.clone(memory_format=torch.contiguous_format) for g in grads]


def _dense(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: reference(*args).contiguous()


def _expert_attention_train(*args: Any) -> list[torch.Tensor]:
    *inputs, gates, negative_slope = args
    outputs, tokens, qkv, attention = reference_stages(*inputs, negative_slope)
    out = outputs if gates is None else gated_sum(outputs.transpose(0, 1), gates)
    return [out.contiguous(), *(x[0].contiguous() for x in (tokens, qkv, attention))]


def _expert_attention_backward(grad: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    *tensors, negative_slope, _saved, needs = rest
    return _gradients(lambda *x: expert_attention_reference(*x, negative_slope), grad, tensors, needs)


def _dkf_fuse_backward(
    grad: torch.Tensor, features: torch.Tensor, gates: torch.Tensor, index: torch.Tensor | None, needs: list[bool]
) -> list[torch.Tensor]:
    return _gradients(lambda *x: dkf_fuse_reference(*x, index), grad, [features, gates], needs)


def _latent_distance_backward(grad: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    *tensors, needs = rest
    return _gradients(latent_distance_reference, grad, tensors, needs)


def _expansion_distances_backward(grad: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    images, encoder, query, noise, needs = rest

    def function(images: torch.Tensor, *tensors: Any) -> torch.Tensor:
        *encoder, query, noise = tensors
        return expansion_distances_reference(images, encoder, query, noise)

    return _gradients(function, grad, [images, *encoder, query, noise], needs)


def _elbo_loss_backward(grad: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    images, encoder, decoder, beta, noise, needs = rest
    width = len(_vae.ENCODER)

    def function(images: torch.Tensor, *tensors: Any) -> torch.Tensor:
        *weights, noise = tensors
        return elbo_loss_reference(images, weights[:width], weights[width:], beta, noise)

    return _gradients(function, grad, [images, *encoder, *decoder, noise], needs)


def _task_attention_backward(grad: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    *tensors, num_heads, scale, needs = rest
    return _gradients(lambda *x: task_attention_reference(*x, num_heads, scale), grad, tensors, needs)


OPS = {
    "expert_attention": _dense(expert_attention_reference),
    "folded_attention": _dense(folded_attention_reference),
    "expert_attention_train": _expert_attention_train,
    "expert_attention_backward": _expert_attention_backward,
    "dkf_fuse": _dense(dkf_fuse_reference),
    "dkf_fuse_backward": _dkf_fuse_backward,
    "latent_distance": latent_distance_reference,
    "latent_distance_backward": _latent_distance_backward,
    "expansion_distances": expansion_distances_reference,
    "expansion_distances_backward": _expansion_distances_backward,
    "elbo_loss": elbo_loss_reference,
    "elbo_loss_backward": _elbo_loss_backward,
    "vae_codes": vae_codes_reference,
    "vae_training_loss": vae_training_loss_reference,
    "head_training_loss": head_training_loss_reference,
    "expert_training_loss": expert_training_loss_reference,
    "strided_conv": _dense(strided_conv_reference),
    "transposed_conv": _dense(transposed_conv_reference),
    "batch_norm_fold": batch_norm_fold_composed,
    "batch_norm_fold_backward": batch_norm_fold_backward_composed,
    "position_noise": position_noise_reference,
    "task_attention": _dense(task_attention_reference),
    "task_attention_backward": _task_attention_backward,
}

BACKEND = Backend("reference", OPS, lambda op, args: None)
