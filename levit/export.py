"""Models as files: saving and loading weights, and a fixed-K program for machines without this package."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from levit.config import LEViTConfig

if TYPE_CHECKING:
    from levit.reference import LEViT

    Model = TypeVar("Model", bound=LEViT)

FORMAT = 1
"""Version of the files that `save_model` writes."""


def save_model(model: LEViT, path: str | Path) -> None:
    """Write configuration and weights; an earlier file is replaced only when the new one is complete."""
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    try:
        torch.save({"format": FORMAT, "config": model.cfg.to_dict(), "model": model.state_dict()}, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_model(kind: type[Model], path: str | Path, device: torch.device | str = "cpu") -> Model:
    """The model in a file of `save_model`, with its experts.

    Nothing but tensors and plain types is read (`weights_only`). Raises `ValueError` naming the file where it is
    corrupt, of another version, or no model.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        version, config, state = content["format"], content["config"], content["model"]
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: corrupt, or no model saved by levit ({reason})") from error
    if version != FORMAT:
        raise ValueError(f"{path}: format {version!r} of another version of levit; this one reads format {FORMAT}")
    try:
        model = kind(LEViTConfig(**config)).to(device, next(iter(state.values())).dtype)
        model.load_state_dict(state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a model of this version of levit ({error})") from error
    return model


class RoutedInference(nn.Module):
    """Per-sample routed prediction with the experts that there are now, free of Python control flow on data.

    Every expert and every head is evaluated for every image, then the image's own is picked: more work than
    `LEViT.forward`, the same numbers, and a graph that `torch.export` can follow.
    """

    def __init__(self, model: LEViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, S, S] → logits [B, num_classes]."""
        model = self.model
        features, routes = model.features(images), model.route(images)
        logits = [expert.head(model.fuse(features[:, : k + 1])) for k, expert in enumerate(model.experts)]
        own = torch.stack(logits, dim=1).gather(1, routes[:, None, None].expand(-1, 1, model.cfg.num_classes))[:, 0]
        if model.router is None:
            return own
        return model.router.with_prior(own, model.router.class_logits(images), routes)


def export_program(model: LEViT) -> torch.export.ExportedProgram:
    """A `torch.export` program of routed prediction with today's experts, for any batch size; plain torch operators.

    `torch.export.save` writes it; it runs where levit is not installed. It computes in the parameters' dtype: copies in
    bfloat16 that a model with `precision="bf16"` keeps are not part of it.
    """
    from levit.reference import LEViT as Reference

    plain = Reference(model.cfg).to(model.weight.device, model.weight.dtype)
    plain.load_state_dict(model.state_dict())
    if plain.router is not None:
        plain.router.plan()  # solved here, the program holds the solution
    cfg = model.cfg
    images = model.weight.new_zeros(2, cfg.channels, cfg.image_size, cfg.image_size)
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(RoutedInference(plain).eval(), (images,), dynamic_shapes=({0: batch},))
