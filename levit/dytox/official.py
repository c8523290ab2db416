"""What a DyTox state_dict tells of its model; keys are those of the public implementation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from levit.dytox.config import DyToxConfig


def saved_classes(state: Mapping[str, Tensor]) -> tuple[list[int], int | None]:
    """Of a state_dict: the classes of each task (0 where its head is missing), and the divergence head's outputs."""
    numbers = [int(found[1]) for key in state if (found := re.match(r"(?:task_tokens|head)\.(\d+)(?:\.|$)", key))]
    heads = [state.get(f"head.{t}.head.weight") for t in range(max(numbers, default=-1) + 1)]
    divergence = state.get("head_div.head.weight")
    any_divergence = any(key.startswith("head_div.") for key in state)
    count = 0 if divergence is None else len(divergence)
    return [0 if head is None else len(head) for head in heads], count if any_divergence else None


def official_config(state: Mapping[str, Tensor], **overrides: Any) -> DyToxConfig:
    """The configuration that a state_dict of the public implementation has (blocks with gated positional attention)."""
    needed = ("patch_embed.proj.weight", "pos_embed", "sabs.0.attn.gating_param", "sabs.0.mlp.fc1.weight")
    if missing := [key for key in needed if key not in state]:
        raise ValueError(f"state_dict: missing keys: {listed(missing)}")
    dim, channels, patch, _ = state["patch_embed.proj.weight"].shape
    classes, _ = saved_classes(state)
    image_size = math.isqrt(state["pos_embed"].shape[1]) * patch
    cifar = image_size == 32
    return DyToxConfig.preset(
        "dytox-cifar100" if cifar else "dytox-imagenet100",
        **{
            "image_size": image_size,
            "channels": channels,
            "patch_size": patch,
            "embed_dim": dim,
            "num_heads": len(state["sabs.0.attn.gating_param"]),
            "mlp_ratio": len(state["sabs.0.mlp.fc1.weight"]) / dim,
            "depth": 1 + max(int(key.split(".")[1]) for key in state if key.startswith("sabs.")),
            "num_classes": max(1, sum(classes)),
            "first_classes": max(1, sum(classes)),
            **overrides,
        },
    )


def listed(keys: list[str]) -> str:
    """For a message."""
    return ", ".join(keys) if keys else "none"
