"""Arguments of expert_attention for the emulator, and what plain torch makes of them."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from emulator import A100, TYPES, Gates

from levit_kernels.expert_attention import expert_attention_reference


class Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("patches", "w_embed", "b_embed", "w_qkv", "b_qkv")),
        ("gates", Gates),
        ("out", c_void_p),
        ("batch", c_int64),
        *((name, c_int32) for name in ("experts", "tokens", "pixels", "width", "heads", "depth")),
        ("slope", c_float),
        *((name, c_int32) for name in ("type", "out_type", "processors", "shared_bytes")),
    ]


GATES = {
    "per expert": lambda b, k, h: torch.randn(k),
    "per head": lambda b, k, h: torch.randn(k, h),
    "per image": lambda b, k, h: torch.randn(b, k, 1),
    "per image and head": lambda b, k, h: torch.randn(b, k, h),
}


def arguments(dtype, batch, experts, tokens, pixels, width, heads, depth, gates=None):
    new = torch.randn
    weights = new(experts, width, 3, heads, depth) / width**0.5
    tensors = [new(batch, tokens, pixels), new(experts, pixels, width) / pixels**0.5, new(experts, width)]
    tensors += [weights, new(experts, 3, heads, depth) * 0.1]
    return [x.to(dtype) for x in tensors] + [gates]


def prepare(emulator, args, gpu=A100, processors=None):
    """-> the call, and the shape and dtype of its result."""
    patches, w_embed, _, w_qkv, _, gates = args
    (batch, tokens, pixels), (experts, _, width), (heads, depth) = patches.shape, w_embed.shape, w_qkv.shape[3:]
    call = Call(*(emulator.upload(x) for x in args[:5]))
    shape, dtype = (experts, batch, tokens, heads * depth), patches.dtype
    if gates is not None:
        shape, dtype = shape[1:], torch.promote_types(dtype, gates.dtype)
        call.gates = emulator.gates(gates)
    call.batch, call.experts, call.tokens, call.pixels = batch, experts, tokens, pixels
    call.width, call.heads, call.depth, call.slope = width, heads, depth, 0.2
    call.type, call.out_type = TYPES[patches.dtype], TYPES[dtype]
    call.processors, call.shared_bytes = processors or gpu["processors"], gpu["shared_bytes"]
    call.out = emulator.allocate(shape, dtype)
    return call, shape, dtype


def run(emulator, args, **options):
    call, shape, dtype = prepare(emulator, args, **options)
    emulator.check(emulator.library.levit_expert_attention(ctypes.byref(call), None))
    return emulator.download(call.out, shape, dtype)


def reference(args):
    return expert_attention_reference(*(x if x is None else x.double() for x in args))


def allowed(args):
    """Twice the error of plain torch in the same precision."""
    widened = [x.to(args[0].dtype) if x is not None else None for x in args]
    return 2 * (expert_attention_reference(*widened).double() - reference(args)).abs().max() + 1e-6
