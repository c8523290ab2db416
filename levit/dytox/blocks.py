"""The blocks of DyTox: self-attention over patches (plain, or gated by position), and task attention.

Parameter names are those of the public implementation, whose checkpoints load.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levit_kernels import task_attention
from levit_kernels.task_attention import task_attention_reference

STD = 0.02
"""Of new weights and tokens, cut off at two units [C]."""


class Mlp(nn.Module):
    """Linear → GELU → Linear, over the last dimension D."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return self.fc2(F.gelu(self.fc1(x)))


class MHSA(nn.Module):
    """Multi-head self-attention over the N patches of each image, without biases but for the projection's."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        query, key, value = split_heads(self.qkv(x), 3, self.num_heads)
        return self.proj(merge_heads(softmax_scores(query, key) @ value))


class GPSA(nn.Module):
    """ConViT's gated positional self-attention: with a gate σ(g) per head, attention is
    (1 - σ(g)) softmax(q kᵀ / √d) + σ(g) softmax(w · (δx, δy, δx² + δy²)), δ from the query's patch to the key's.
    """

    def __init__(self, dim: int, num_heads: int, side: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qk = nn.Linear(dim, 2 * dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.pos_proj = nn.Linear(3, num_heads)
        self.gating_param = nn.Parameter(torch.ones(num_heads))
        self.register_buffer("offsets", patch_offsets(side), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        query, key = split_heads(self.qk(x), 2, self.num_heads)
        (value,) = split_heads(self.v(x), 1, self.num_heads)
        position = torch.softmax(self.pos_proj(self.offsets).permute(2, 0, 1), -1)  # [H, N, N], of no image
        gate = torch.sigmoid(self.gating_param)[:, None, None]
        attention = torch.lerp(softmax_scores(query, key), position, gate)
        return self.proj(merge_heads(attention @ value))

    @torch.no_grad()
    def start_locally(self, strength: float) -> None:
        """Values pass unchanged, and head h looks at the h-th of the ⌊√H⌋² patches around its own [C].

        Heads beyond these keep random directions.
        """
        self.v.weight.copy_(torch.eye(len(self.v.weight)))
        side = int(self.num_heads**0.5)
        centre = (side - 1) / 2 if side % 2 == 0 else side // 2
        for head in range(side * side):
            row, column = head % side, head // side
            self.pos_proj.weight[head] = torch.tensor([2 * (column - centre), 2 * (row - centre), -1.0])
        self.pos_proj.weight.mul_(strength)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), over patches [B, N, D]."""

    def __init__(self, attention: MHSA | GPSA, dim: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TaskAttention(nn.Module):
    """The parameters of task attention: query, key and value without biases, and the projection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, patches: Tensor, joint: bool) -> Tensor:
        """tokens [T, D], patches [B, N, D] → [B, T, D]; `joint` chooses who computes it, not what."""
        weights = (self.q.weight, self.k.weight, self.v.weight, self.proj.weight, self.proj.bias, self.num_heads)
        return (task_attention if joint else task_attention_reference)(tokens, patches, *weights)


class TaskBlock(nn.Module):
    """The decoder: tokens look at the patches, and each goes through the MLP by itself."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = TaskAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, tokens: Tensor, patches: Tensor, joint: bool = True) -> Tensor:
        """tokens [T, D], patches [B, N, D] → embeddings [B, T, D]: in one pass, or as published one pass per token."""
        if not joint and len(tokens) > 1:
            return torch.cat([self(token[None], patches, joint) for token in tokens], 1)
        x = tokens + self.attn(self.norm1(tokens), self.norm1(patches), joint)
        return x + self.mlp(self.norm2(x))


def split_heads(x: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts·H·d] → `parts` tensors [B, H, N, d]."""
    return x.unflatten(-1, (parts, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, N, d] → [B, N, H·d]."""
    return x.transpose(1, 2).flatten(2)


def softmax_scores(query: Tensor, key: Tensor) -> Tensor:
    """softmax(q kᵀ / √d): [B, H, N, N]."""
    return torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)


def patch_offsets(side: int) -> Tensor:
    """(δx, δy, δx² + δy²) from each patch to each of a side × side grid in row-major order: [N, N, 3]."""
    row, column = torch.arange(side * side).div(side, rounding_mode="floor"), torch.arange(side * side) % side
    x, y = column[None] - column[:, None], row[None] - row[:, None]
    return torch.stack([x, y, x**2 + y**2], -1).to(torch.get_default_dtype())


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Linear layers anew: truncated normal weights of deviation `STD`, biases 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=STD, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
