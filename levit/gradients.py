"""The gradients of a training step straight from the kernels: the loss has no graph, and autograd nothing to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from levit.cache import CachedRows
from levit_kernels.expert_training import expert_training_gradients
from levit_kernels.vae_training import vae_training_gradients

if TYPE_CHECKING:
    from levit.model import LEViT


def set_kernel_gradients(
    model: LEViT, images: Tensor, labels: Tensor, cache: CachedRows | None, noise: Tensor
) -> Tensor | None:
    """`model.set_gradients` by the kernels of the VAE and of the whole classifier.

    Returns:
        The loss; None, with nothing done, where there are no such kernels or where autograd would do more than set the
        gradients: parameters that do not learn, hooks, autocast.
    """
    parameters = list(model.active.parameters())
    exact = torch.is_grad_enabled() and not torch.is_autocast_enabled(images.device.type)
    if not (exact and model.trains_whole and model.cfg.vae == "mlp" and all(map(_learns_unwatched, parameters))):
        return None
    with torch.no_grad():
        vae_call = model.vae_arguments(images, noise)
        of_vae = vae_training_gradients(*vae_call)
        if of_vae is None:
            return None
        gates, *frozen = model.transfer(images, cache)
        call = model.classifier_arguments(images, labels, (gates, *frozen))
        of_classifier = expert_training_gradients(*call)
        if of_classifier is None:
            return None
        (vae_loss, *by_vae), (loss, *found) = of_vae, of_classifier
        leaves = [*call[2], *call[3]]  # attention, head
        by_leaves, found = found[: len(leaves)], found[len(leaves) :]
        for parameter in parameters:
            parameter.grad = None
        for parameter, gradient in zip([*leaves, *vae_call[1]], [*by_leaves, *by_vae], strict=True):
            parameter.grad = gradient
        if gates is not None:
            by_gates = found.pop(0)
            if model.cfg.gating == "learned":
                model.active.gates.grad = _through_softmax(gates, by_gates)
        model.move_statistics(images, found)
        return loss + vae_loss


def _learns_unwatched(parameter: Tensor) -> bool:
    """Whether a backward pass would do no more to it than set its gradient."""
    return parameter.requires_grad and not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _through_softmax(result: Tensor, gradient: Tensor) -> Tensor:
    """From the gradient of a softmax over the first dimension, [n, ...] as its result, to that of its argument."""
    weighted = result * gradient
    return weighted - result * weighted.sum(0)
