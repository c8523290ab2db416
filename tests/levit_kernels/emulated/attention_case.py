"""Arguments of expert_attention for the emulator, and what plain torch makes of them."""

import torch

from levit_kernels.cuda.expert_attention import expert_attention
from levit_kernels.expert_attention import expert_attention_reference

GATES = {
    "per expert": lambda b, k, h: torch.randn(k),
    "per head": lambda b, k, h: torch.randn(k, h),
    "per image": lambda b, k, h: torch.randn(b, k, 1),
    "per image and head": lambda b, k, h: torch.randn(b, k, h),
}


def arguments(dtype, batch, experts, tokens, pixels, width, heads, depth, gates=None):
    """-> patches, w_embed, b_embed, w_qkv, b_qkv, gates"""
    new = torch.randn
    weights = new(experts, width, 3, heads, depth) / width**0.5
    tensors = [new(batch, tokens, pixels), new(experts, pixels, width) / pixels**0.5, new(experts, width)]
    tensors += [weights, new(experts, 3, heads, depth) * 0.1]
    return [x.to(dtype) for x in tensors] + [gates]


def run(args):
    return expert_attention(*args, 0.2)


def reference(args):
    return expert_attention_reference(*(x if x is None else x.double() for x in args))


def allowed(args):
    """Twice the error of plain torch in the same precision."""
    same = [x if x is None else x.to(args[0].dtype) for x in args]
    return 2 * (expert_attention_reference(*same).double() - reference(args)).abs().max() + 1e-6
