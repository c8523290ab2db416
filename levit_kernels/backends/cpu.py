"""The native CPU kernels (csrc/cpu) as a backend; gradients without a kernel of their own are the composed ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .. import gates as gating
from .. import native
from .._check import at_least_float32
from ..composed import elbo_loss as composed_elbo_loss
from ..composed import expert_attention as composed_attention
from ..composed import task_attention as composed_tasks
from ..composed import vae_codes as composed_codes
from ..composed.expert_attention_backward import expert_attention_backward as composed_attention_backward
from ..composed.latent_distance import latent_distance_backward
from ..composed.task_forms import folds
from ..folded_attention import FoldedWeights
from ..position_noise import signed
from . import cpu_training
from .cpu_convolutions import strided_conv, transposed_conv
from .cpu_fusion import STORES, dkf_fuse, dkf_fuse_backward, sums_dtype
from .registry import Backend, device_of


def expert_attention(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> torch.Tensor:
    """See levit_kernels.expert_attention."""
    tensors, weights, dtype = _gated((patches, w_embed, b_embed, w_qkv, b_qkv), gates)
    return torch.ops.levit_native.expert_attention(*tensors, weights, negative_slope).to(dtype)


def folded_attention(
    patches: torch.Tensor,
    weights: FoldedWeights,
    gates: torch.Tensor | None,
    negative_slope: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See levit_kernels.folded_attention."""
    tensors, scales, dtype = _gated((patches, *weights), gates)
    if out is None:
        sizes = (*patches.shape[:2], weights.b_values[0].numel())
        sizes, like = (sizes, scales) if scales is not None else ((len(weights.b_values), *sizes), patches)
        out = like.new_empty(sizes)
    torch.ops.levit_native.folded_attention(*tensors, scales, negative_slope, out)
    return out.to(dtype)


def _gated(
    tensors: tuple[torch.Tensor, ...], gates: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.dtype]:
    """Patches and weights, gates `[B or 1, K, H or 1]` and the result's dtype.

    Gates of bfloat16 patches are float32, as their sums are; float64 gates make everything float64.
    """
    dtype = tensors[0].dtype
    if gates is None:
        return tensors, None, dtype
    dtype = torch.promote_types(dtype, gates.dtype)
    sums = at_least_float32(dtype)
    if sums == torch.float64:
        tensors = tuple(x.to(sums) for x in tensors)
    return tensors, gating.expand(gates).to(sums), dtype


def expert_attention_train(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    negative_slope: float,
) -> list[torch.Tensor]:
    """One expert -> its output, and what `expert_attention_backward` needs: tokens, projections and attention."""
    if not _trains(patches, gates):
        return composed_attention.expert_attention_train(patches, w_embed, b_embed, w_qkv, b_qkv, gates, negative_slope)
    args = _one_expert(patches, w_embed, b_embed, w_qkv, b_qkv, gates)
    out, *kept = torch.ops.levit_native.expert_attention_train(*args, negative_slope, False)
    return [out[None] if gates is None else out, *kept]


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
    """Gradients of the tensor arguments that `needs` names, in their order; natively where one expert kept `saved`."""
    if not saved or not _trains(patches, gates):
        args = (grad, patches, w_embed, b_embed, w_qkv, b_qkv, gates, negative_slope, saved, needs)
        return composed_attention_backward(*args)
    args = _one_expert(patches, w_embed, b_embed, w_qkv, b_qkv, gates)
    dense = (grad if gates is not None else grad[0]).to(patches.dtype).contiguous()
    by_patches, by_w_embed, by_b_embed, by_w_qkv, by_b_qkv, by_gates = (
        torch.ops.levit_native.expert_attention_train_backward(dense, *args, negative_slope, saved, needs[0], False)
    )
    grads = [by_patches, by_w_embed.t()[None], by_b_embed[None], by_w_qkv.permute(3, 0, 1, 2)[None], by_b_qkv[None]]
    grads.append(gating.reduce_like(by_gates[:, None], gates) if needs[5] else by_gates)
    return [x for x, need in zip(grads, needs, strict=True) if need]


def _trains(patches: torch.Tensor, gates: torch.Tensor | None) -> bool:
    """Whether the kernel for one expert in training takes this; its sums run in the patches' dtype."""
    if patches.dtype == torch.bfloat16:
        return False
    return gates is None or torch.promote_types(patches.dtype, gates.dtype) == patches.dtype


def _one_expert(
    patches: torch.Tensor,
    w_embed: torch.Tensor,
    b_embed: torch.Tensor,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    gates: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The arguments of one expert, dense, weights in nn.Linear's layout."""
    tensors = (patches, w_embed[0].t(), b_embed[0], w_qkv[0].permute(1, 2, 3, 0), b_qkv[0])
    gates = None if gates is None else gating.expand(gates)[:, 0].to(patches.dtype).contiguous()
    return (*(x.contiguous() for x in tensors), gates)


def latent_distance(codes: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """See levit_kernels.latent_distance."""
    return torch.ops.levit_native.latent_distance(codes, query)


def position_noise(
    positions: torch.Tensor, experts: torch.Tensor, latent_dim: int, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """See levit_kernels.position_noise."""
    return torch.ops.levit_native.position_noise(positions, experts, latent_dim, signed(seed)).to(dtype)


def elbo_loss(
    images: torch.Tensor,
    encoder: Sequence[torch.Tensor],
    decoder: Sequence[torch.Tensor],
    beta: float,
    noise: torch.Tensor | None,
) -> torch.Tensor:
    """See levit_kernels.elbo_loss.

    The kernel reads weights in nn.Linear's layout; another one would have to be copied and is left to torch.
    """
    weights = _linear_layout([*encoder, *decoder])
    if weights is None:
        return composed_elbo_loss.elbo_loss(images, encoder, decoder, beta, noise)
    return torch.ops.levit_native.elbo_loss(images, weights[:8], weights[8:], beta, noise)


def vae_codes(
    images: torch.Tensor, encoder: Sequence[torch.Tensor], noise: torch.Tensor, bf16: bool = False
) -> torch.Tensor:
    """See levit_kernels.vae_codes; natively where `elbo_loss` is."""
    weights = _linear_layout(encoder)
    if weights is None:
        return composed_codes.vae_codes(images, encoder, noise)
    return torch.ops.levit_native.vae_codes(images, weights, noise, bf16)


def _linear_layout(weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The weights as [K, out, in] without a copy, None where they are no views of that."""
    views = [x.transpose(1, 2) if x.dim() == 3 else x for x in weights]
    return views if all(x.is_contiguous() for x in views) else None


def task_attention(
    tokens: torch.Tensor,
    patches: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    bo: torch.Tensor,
    num_heads: int,
    scale: float | None,
) -> torch.Tensor:
    """See levit_kernels.task_attention.

    Where folding saves operations, nearly all that is left are matrix products, which torch computes at the CPU's peak.
    """
    depth = patches.shape[2] // num_heads
    if folds(num_heads, len(tokens), depth, patches.shape[1]):
        return composed_tasks.task_attention(tokens, patches, wq, wk, wv, wo, bo, num_heads, scale)
    scale = depth**-0.5 if scale is None else scale
    out = patches.new_empty(len(patches), *tokens.shape)
    torch.ops.levit_native.task_attention(tokens, patches, wq, wk, wv, wo, bo, num_heads, scale, out)
    return out


OPS = {
    "expert_attention": expert_attention,
    "folded_attention": folded_attention,
    "expert_attention_train": expert_attention_train,
    "expert_attention_backward": expert_attention_backward,
    "latent_distance": latent_distance,
    "latent_distance_backward": latent_distance_backward,
    "position_noise": position_noise,
    "elbo_loss": elbo_loss,
    "elbo_loss_backward": composed_elbo_loss.elbo_loss_backward,
    "vae_codes": vae_codes,
    **cpu_training.OPS,
    "strided_conv": strided_conv,
    "transposed_conv": transposed_conv,
    "task_attention": task_attention,
    "task_attention_backward": composed_tasks.task_attention_backward,
    "dkf_fuse": dkf_fuse,
    "dkf_fuse_backward": dkf_fuse_backward,
}


@functools.cache
def unavailable() -> str | None:
    """Why no native kernel can run in this process, or None. Loads the library to find out."""
    ok, reason = native.available()
    return None if ok else reason


def refuse(op: str, args: tuple) -> str | None:
    """Why the native kernels do not take a call."""
    if device_of(args).type != "cpu":
        return f"the tensors are on {device_of(args)}"
    if op == "position_noise":
        return None
    if op.startswith("dkf_fuse"):
        features, gates = args[op == "dkf_fuse_backward" :][:2]
        if (features.dtype, sums_dtype(features, gates)) not in STORES:
            return f"takes no {features.dtype} features with {gates.dtype} gates"
        return None
    if op.startswith("expert_attention") or op == "folded_attention":
        if getattr(args[1], "dtype", None) == torch.bfloat16:
            return None
        args = args[1:2]  # the dtype of patches and weights; gates may have any
    if op.startswith("expert_training") and args[6] is not None and (args[6].dtype, args[0].dtype) not in STORES:
        return f"takes no {args[6].dtype} features with {args[0].dtype} patches"
    if op.startswith(("head_training", "expert_training")):
        args = args[:1]  # labels are integers
    if op == "move_statistics":
        means, variances, _, biases, statistics, *_ = args  # counters are integers
        args = (*means, *variances, *biases, *statistics)
        if not all(x.is_contiguous() and x.dtype == means[0].dtype for x in args):
            return "takes dense tensors of one dtype"
    if op.startswith("elbo_loss") and args[op == "elbo_loss_backward"].dtype == torch.bfloat16:
        return None
    for x in args:
        if isinstance(x, torch.Tensor) and x.dtype not in (torch.float32, torch.float64):
            return f"takes float32 and float64, got {x.dtype}"
    return None


BACKEND = Backend("cpu", OPS, refuse, unavailable)
