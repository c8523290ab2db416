"""How many blocks of a kernel an SM of an NVIDIA GPU holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

WARPS, BLOCKS, REGISTERS = 64, 32, 1 << 16  # that an SM holds, on all of GPUS
RESERVED = 1 << 10  # bytes of its shared memory that the system takes for each block


@dataclass(frozen=True)
class GPU:
    """A full-size GPU of an architecture: its SMs, and the bytes of shared memory of one."""

    processors: int
    shared: int

    @property
    def shared_of_block(self) -> int:
        """Bytes that one block may have."""
        return self.shared - RESERVED


GPUS = {"sm_80": GPU(108, 164 << 10), "sm_90": GPU(132, 228 << 10), "sm_100": GPU(148, 228 << 10)}


def blocks_per_sm(target: str, registers: int, shared: int, warps: int) -> int:
    """By the registers of a thread, the bytes of shared memory and the warps of a block.

    Each of the four parts of an SM deals out a quarter of its registers, in units of 256 to a warp; shared memory comes
    in units of 128 bytes.
    """
    by_registers = (REGISTERS // 4 // (-(-registers * 32 // 256) * 256)) * 4 // warps
    by_shared = GPUS[target].shared // (-(-(shared + RESERVED) // 128) * 128)
    return min(WARPS // warps, BLOCKS, by_registers, by_shared)
