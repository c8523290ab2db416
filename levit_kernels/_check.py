"""Input checks shared by the ops: one line per argument; messages name it, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Shapes:
    """Binds the letters of a shape pattern at first sight and compares every later argument with them.

    `Shapes("op").match("patches", x, "B N P")` raises ValueError for a wrong shape or device and TypeError for a wrong
    dtype. A digit in the pattern is a fixed size. Only letters in `may_be_empty` may be bound to 0.
    """

    __slots__ = ("device", "device_owner", "dtype", "dtype_owner", "op", "size", "may_be_empty")

    def __init__(self, op: str, may_be_empty: str = "B M") -> None:
        self.op = op
        self.size: dict[str, int] = {}
        self.may_be_empty = may_be_empty.split()
        self.device = self.dtype = None
        self.device_owner = self.dtype_owner = ""

    def match(self, name: str, tensor: torch.Tensor, pattern: str, same_dtype: bool = True) -> None:
        letters, shape, size = pattern.split(" "), tensor.shape, self.size
        good = len(letters) == len(shape)
        if good:
            for letter, length in zip(letters, shape, strict=True):
                known = size.get(letter)
                if known is None:
                    if letter.isdigit():
                        known = int(letter)
                    else:
                        size[letter] = known = length
                        if letter not in self.may_be_empty and length < 1:
                            raise ValueError(f"{self.op}: {name} must have {letter} >= 1, got shape {list(shape)}")
                if known != length:
                    good = False
                    break
        if not good:
            expected = ", ".join(x if x.isdigit() or x not in size else f"{x}={size[x]}" for x in letters)
            raise ValueError(f"{self.op}: {name} must have shape [{expected}], got {list(shape)}")
        dtype, device = tensor.dtype, tensor.device
        if dtype not in FLOATS:
            raise TypeError(f"{self.op}: {name} must be floating point (float64, 32, 16 or bfloat16), got {dtype}")
        if same_dtype and dtype != self.dtype:
            if self.dtype is not None:
                raise TypeError(f"{self.op}: {name} must be {self.dtype} like {self.dtype_owner}, got {dtype}")
            self.dtype, self.dtype_owner = dtype, name
        self.match_device(name, device)

    def match_device(self, name: str, device: torch.device) -> None:
        if device != self.device:
            if self.device is not None:
                raise ValueError(f"{self.op}: {name} must be on {self.device} like {self.device_owner}, got {device}")
            self.device, self.device_owner = device, name

    def match_list(self, name: str, tensors: Sequence[torch.Tensor], patterns: dict[str, str]) -> None:
        if len(tensors) != len(patterns):
            raise ValueError(
                f"{self.op}: {name} must hold {len(patterns)} tensors [{', '.join(patterns)}], got {len(tensors)}"
            )
        for tensor, (part, pattern) in zip(tensors, patterns.items(), strict=True):
            self.match(f"{name}.{part}", tensor, pattern)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and softmaxes run."""
    return torch.promote_types(dtype, torch.float32)
