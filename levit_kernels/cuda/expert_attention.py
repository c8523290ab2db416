"""expert_attention on the CUDA kernels, forward and backward."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from ..gates import reduce_like
from .runtime import TYPES, Gates, Runtime, current

MMA_SIZES = ((64, 64), (112, 104), (128, 128))  # Q and d of the tiles in csrc/cuda/expert_attention.cu


class Call(ctypes.Structure):
    """LevitExpertAttention."""

    _fields_ = [
        *((name, c_void_p) for name in ("patches", "w_embed", "b_embed", "w_qkv", "b_qkv")),
        ("gates", Gates),
        ("out", c_void_p),
        ("batch", c_int64),
        *((name, c_int32) for name in ("experts", "tokens", "pixels", "width", "heads", "depth")),
        ("slope", c_float),
        *((name, c_int32) for name in ("type", "out_type", "processors", "shared_bytes")),
    ]


class BackwardCall(ctypes.Structure):
    """LevitExpertAttentionBackward."""

    _fields_ = [
        ("forward", Call),
        *((name, c_void_p) for name in ("grad", "tokens", "by_tokens", "by_qkv", "by_gates", "by_patches")),
        *((name, c_void_p) for name in ("by_w_embed", "by_b_embed", "by_w_qkv", "by_b_qkv")),
    ]


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
    runtime = current()
    tensors = [x.contiguous() for x in (patches, w_embed, b_embed, w_qkv, b_qkv)]
    wide = None if gates is None else gates.float()
    call = _sizes(runtime, patches, w_qkv, gates, negative_slope)
    _point_to(runtime, call, tensors, wide)
    shape = (call.batch, call.tokens, call.heads * call.depth)
    out = patches.new_empty(shape if gates is not None else (call.experts, *shape), dtype=_out_dtype(patches, gates))
    call.out = runtime.result(out)
    runtime.start("levit_expert_attention", call, patches.device)
    return out


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
    """Gradients of the tensors that `needs` names; nothing is saved, all is recomputed."""
    runtime = current()
    tensors = [x.contiguous() for x in (patches, w_embed, b_embed, w_qkv, b_qkv)]
    wide, grad = None if gates is None else gates.float(), grad.contiguous()
    forward = _sizes(runtime, patches, w_qkv, gates, negative_slope)
    _point_to(runtime, forward, tensors, wide)
    call = BackwardCall(forward, runtime.source(grad))
    rows, outputs = forward.batch * forward.tokens, 3 * forward.heads * forward.depth
    widths = {"tokens": forward.width, "by_tokens": forward.width, "by_qkv": outputs}
    # in a list: working memory must live until the kernels have started
    scratch = [patches.new_empty(forward.experts, rows, width, dtype=torch.float32) for width in widths.values()]
    for name, tensor in zip(widths, scratch, strict=True):
        setattr(call, name, runtime.result(tensor))
    names = ("patches", "w_embed", "b_embed", "w_qkv", "b_qkv")
    computed = [needs[0], *(needs[1] or needs[2],) * 2, *(needs[3] or needs[4],) * 2]  # a bias comes with its weights
    grads = [torch.empty_like(x) if needed else None for x, needed in zip(tensors, computed, strict=True)]
    for name, tensor in zip(names, grads, strict=True):
        setattr(call, f"by_{name}", runtime.result(tensor))
    if wide is not None:
        by_gates = wide.new_empty(forward.batch, forward.experts, forward.heads)
        call.by_gates = runtime.result(by_gates)
    runtime.start("levit_expert_attention_backward", call, patches.device)
    if wide is not None:
        grads.append(reduce_like(by_gates, gates))
    return [x for x, need in zip(grads, needs, strict=False) if need]


def refuse(op: str, args: tuple) -> str | None:
    """Why no kernel holds a call, or None."""
    patches, *_, w_qkv, _, gates, slope = args[1:8] if op.endswith("_backward") else args[:7]
    call = _sizes(current(), patches, w_qkv, gates, slope)
    if op.endswith("_backward"):
        fits = current().library.levit_expert_attention_backward_fits(ctypes.byref(BackwardCall(call)))
    else:
        fits = current().library.levit_expert_attention_fits(ctypes.byref(call))
    sizes = f"N={call.tokens}, P={call.pixels}, Q={call.width}, H={call.heads}, d={call.depth}"
    return None if fits else f"no block can hold {sizes}"


def useful_share(patches: torch.Tensor, w_qkv: torch.Tensor, device: torch.device) -> float | None:
    """Arithmetic that equations 2 and 3 need over what the tiles on tensor cores compute; None: it does not run there.

    The tensors give sizes and dtype, `device` the GPU.
    """
    runtime = current()
    call = _sizes(runtime, patches, w_qkv, None, 0.0, device)
    if runtime.library.levit_expert_attention_fits(ctypes.byref(call)) != 2:
        return None
    width, depth = next(x for x in MMA_SIZES if call.width <= x[0] and call.depth <= x[1])
    useful = call.tokens * (call.pixels * call.width + call.heads * call.depth * (3 * call.width + 2 * call.tokens))
    pixels, scored = -(-call.pixels // 16) * 16, -(-depth // 16) * 16
    return useful / (16 * (pixels * width + call.heads * (3 * width * depth + 16 * scored + 16 * depth)))


def _out_dtype(patches: torch.Tensor, gates: torch.Tensor | None) -> torch.dtype:
    return patches.dtype if gates is None else torch.promote_types(patches.dtype, gates.dtype)


def _sizes(
    runtime: Runtime,
    patches: torch.Tensor,
    w_qkv: torch.Tensor,
    gates: torch.Tensor | None,
    slope: float,
    device: torch.device | None = None,
) -> Call:
    call = Call(slope=slope, type=TYPES[patches.dtype], out_type=TYPES[_out_dtype(patches, gates)])
    call.batch, call.tokens, call.pixels = patches.shape
    call.experts, call.width, _, call.heads, call.depth = w_qkv.shape
    call.processors, call.shared_bytes = runtime.gpu(device or patches.device)
    return call


def _point_to(runtime: Runtime, call: Call, tensors: list[torch.Tensor], gates: torch.Tensor | None) -> None:
    for name, tensor in zip(("patches", "w_embed", "b_embed", "w_qkv", "b_qkv"), tensors, strict=True):
        setattr(call, name, runtime.source(tensor))
    call.gates = runtime.gates(gates)
