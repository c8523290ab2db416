"""Fused ops for expansible vision transformers: functions on tensors that know nothing of the models above them."""

from __future__ import annotations

from .accelerate import accelerate
from .backends.registry import BackendError, use_backend
from .dkf_fuse import dkf_fuse
from .elbo_loss import elbo_loss
from .expansion_distances import expansion_distances
from .expert_attention import expert_attention
from .latent_distance import latent_distance
from .task_attention import task_attention

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "accelerate",
    "dkf_fuse",
    "elbo_loss",
    "expansion_distances",
    "expert_attention",
    "latent_distance",
    "task_attention",
    "use_backend",
]
