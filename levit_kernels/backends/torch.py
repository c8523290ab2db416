"""The composed ops as a backend: good torch calls on any device."""

from __future__ import annotations

import torch

from ..batch_norm_fold import batch_norm_fold_backward_composed, batch_norm_fold_composed
from ..composed import (
    dkf_fuse,
    elbo_loss,
    expansion_distances,
    expert_attention,
    expert_attention_backward,
    latent_distance,
    task_attention,
    vae_codes,
)
from ..expert_training import expert_training_loss_reference
from ..head_training import head_training_loss_reference
from ..position_noise import position_noise_reference
from ..strided_conv import strided_conv_reference, transposed_conv_reference
from ..vae_training import vae_training_loss_reference
from .registry import Backend, device_of

OPS = {
    "expert_attention": expert_attention.expert_attention,
    "expert_attention_train": expert_attention.expert_attention_train,
    "expert_attention_backward": expert_attention_backward.expert_attention_backward,
    "dkf_fuse": dkf_fuse.dkf_fuse,
    "dkf_fuse_backward": dkf_fuse.dkf_fuse_backward,
    "latent_distance": latent_distance.latent_distance,
    "latent_distance_backward": latent_distance.latent_distance_backward,
    "expansion_distances": expansion_distances.expansion_distances,
    "expansion_distances_backward": expansion_distances.expansion_distances_backward,
    "elbo_loss": elbo_loss.elbo_loss,
    "elbo_loss_backward": elbo_loss.elbo_loss_backward,
    "vae_codes": vae_codes.vae_codes,
    "vae_training_loss": vae_training_loss_reference,
    "head_training_loss": head_training_loss_reference,
    "expert_training_loss": expert_training_loss_reference,
    "strided_conv": lambda *args: strided_conv_reference(*args).contiguous(),
    "transposed_conv": lambda *args: transposed_conv_reference(*args).contiguous(),
    "batch_norm_fold": batch_norm_fold_composed,
    "batch_norm_fold_backward": batch_norm_fold_backward_composed,
    "position_noise": position_noise_reference,
    "task_attention": task_attention.task_attention,
    "task_attention_backward": task_attention.task_attention_backward,
}


def refuse(op: str, args: tuple) -> str | None:
    """Why the composed ops do not take a call."""
    if device_of(args).type == "cpu" and any(isinstance(x, torch.Tensor) and x.dtype == torch.float16 for x in args):
        return "float16 on a CPU is left to the reference: torch has no fast float16 products there"
    return None


BACKEND = Backend("torch", OPS, refuse)
