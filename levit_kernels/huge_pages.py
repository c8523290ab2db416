"""Huge pages under a large buffer that is read at random, where the system has them."""

from __future__ import annotations

import torch

from . import native


def huge_pages(buffer: torch.Tensor) -> bool:
    """Asks the system to back the buffer with huge pages, before anything is written to it; contents stay as they are.

    Args:
        buffer: contiguous, in main memory; smaller ones than a huge page (2 MiB) gain nothing.

    Returns:
        Whether the system agreed; False on other devices, other systems than Linux and without the native library.
    """
    if buffer.device.type != "cpu" or not native.available()[0]:
        return False
    return torch.ops.levit_native.huge_pages(buffer)
