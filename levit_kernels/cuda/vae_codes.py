"""vae_codes on a GPU: batched products, which torch's libraries compute best."""

from __future__ import annotations

from ..composed.vae_codes import vae_codes

__all__ = ["refuse", "vae_codes"]


def refuse(op: str, args: tuple) -> None:
    """Nothing is refused."""
