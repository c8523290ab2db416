"""What Triton's interpreter does not do as the hardware does, mended: it truncates to bfloat16 instead of rounding to
the nearest, multiplies the bit patterns of bfloat16 numbers as if they were integers, and knows no TF32.
"""

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir as _ir
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def mend():
    """Replaces the interpreter's conversion and product, and spares it a copy."""
    convert = InterpreterBuilder.cast_impl
    InterpreterBuilder.cast_impl = lambda self, src, dst: _cast(self, src, dst, convert)
    InterpreterBuilder.create_dot = _dot
    # copies every tensor's whole memory onto itself after every launch: everything is on the CPU already
    GridExecutor._restore_args_dev = lambda *_: None


def _cast(builder, src, dst_type, convert):
    kinds = (src.dtype.scalar, dst_type.scalar)
    if kinds == (tl.float32, tl.bfloat16):
        return TensorHandle(to_bfloat16(src.data), tl.bfloat16)
    if kinds == (tl.bfloat16, tl.float32):
        return TensorHandle(from_bfloat16(src.data), tl.float32)
    return convert(builder, src, dst_type)


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    a, b = (from_bfloat16(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32) for x in (a, b))
    if input_precision != _ir.INPUT_PRECISION.TF32x3:
        return TensorHandle(np.matmul(a, b) + d.data, d.dtype.scalar)
    (a, a_rest), (b, b_rest) = ((high, to_tf32(x - high)) for x in (a, b) for high in [to_tf32(x)])
    small = np.nan_to_num(np.matmul(a_rest, b) + np.matmul(a, b_rest))  # infinities leave NaN there
    return TensorHandle(small + np.matmul(a, b) + d.data, d.dtype.scalar)


def to_tf32(x):
    """The nearest number of 11 bits, as `cvt.rna.tf32.f32` makes it; infinities and NaN stay."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return np.where(np.isfinite(x), (bits + 0x1000) & 0xFFFFE000, bits).astype(np.uint32).view(np.float32)


def to_bfloat16(x):
    """Bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)
