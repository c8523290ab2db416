"""From the host to a device, without waiting for what the device still has to do."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. A copy from pageable memory would first wait for all work queued on a GPU: it goes through
    pinned memory, which torch's allocator keeps until the copy has been made.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
