"""What `python -m bench.gpu` checks and times: the ops at published sizes, and who may compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import levit_kernels
from levit_kernels import gates as gating
from levit_kernels.backends import registry
from levit_kernels.dkf_fuse import dkf_fuse_reference
from levit_kernels.elbo_loss import elbo_loss_reference
from levit_kernels.expansion_distances import expansion_distances_reference
from levit_kernels.expert_attention import expert_attention_reference
from levit_kernels.head_training import head_training_loss, head_training_loss_reference
from levit_kernels.latent_distance import latent_distance_reference
from levit_kernels.task_attention import task_attention_reference
from levit_kernels.vae_training import vae_training_loss, vae_training_loss_reference

BACKENDS = ("triton", "torch", "reference")
UNPROVEN = ("cuda",)  # no GPU has run these kernels yet: they come last, where a fault can spoil nothing else
REFERENCES = {
    "expert_attention": expert_attention_reference,
    "dkf_fuse": dkf_fuse_reference,
    "latent_distance": latent_distance_reference,
    "expansion_distances": expansion_distances_reference,
    "elbo_loss": elbo_loss_reference,
    "task_attention": task_attention_reference,
    "vae_training_loss": vae_training_loss_reference,
    "head_training_loss": head_training_loss_reference,
}
TRAINING = {"vae_training_loss": vae_training_loss, "head_training_loss": head_training_loss}


@dataclass(frozen=True)
class GpuCase:
    """An op at one size; `make(device, dtype)` gives its arguments, flops and bytes are the least that it needs."""

    op: str
    size: str
    make: Callable[[str, torch.dtype], tuple]
    flops: float
    numbers: float  # read and written; times the size of the dtype these are the bytes
    constant: tuple[int, ...] = ()  # places of floating-point arguments that get no gradient

    @property
    def function(self) -> Callable[..., Any]:
        return TRAINING.get(self.op) or getattr(levit_kernels, self.op)

    def on_backends(self, names: Sequence[str], args: tuple) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, call) of those that take the call."""
        for name in names:
            if refusal(name, self.op, args) is None:
                yield name, self._timed(partial(_forced, name, self.function), args)

    def _timed(self, function: Callable[..., Any], args: tuple) -> Callable[[], Any]:
        """The call alone; that of a training loss with its gradients, which some backends compute at once."""
        if self.op in TRAINING:
            return partial(_with_gradients, self.constant, function, args)
        return partial(function, *args)

    def variants(self, args: tuple) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, call): every backend that takes the call, torch.compile of the reference, SDPA where it applies."""
        yield from self.on_backends(BACKENDS, args)
        if self.op != "task_attention":  # whose passes, one per token, take the compiler minutes
            compiled = torch.compile(REFERENCES[self.op], fullgraph=True)
            yield "compiled reference", self._timed(compiled, args)
        if self.op == "expert_attention":
            yield "sdpa", lambda: attention_by_sdpa(*args)
            compiled_sdpa = torch.compile(attention_by_sdpa, fullgraph=True)
            yield "compiled sdpa", lambda: compiled_sdpa(*args)


def refusal(name: str, op: str, args: tuple) -> str | None:
    """Why a backend does not take a call even where it is forced, or None."""
    with levit_kernels.use_backend(name):
        return registry.backends()[name].reason_against(op, args)


def on_backend(name: str, function: Callable[..., Any], args: tuple) -> Any:
    """One call on a forced backend."""
    with levit_kernels.use_backend(name):
        return function(*args)


def attention_by_sdpa(
    patches: Tensor,
    w_embed: Tensor,
    b_embed: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    gates: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """expert_attention as one would write it today: batched products and scaled_dot_product_attention."""
    (batch, length, _), (experts, width, _, heads, depth) = patches.shape, w_qkv.shape
    rows = patches.reshape(1, batch * length, -1).expand(experts, -1, -1)
    tokens = F.leaky_relu(torch.baddbmm(b_embed[:, None], rows, w_embed), negative_slope)
    qkv = torch.baddbmm(b_qkv.reshape(experts, 1, -1), tokens, w_qkv.reshape(experts, width, -1))
    query, key, value = qkv.view(experts * batch, length, 3, heads, depth).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    out = out.reshape(experts, batch, length, heads * depth)
    return out if gates is None else gating.gated_sum(out.transpose(0, 1), gates)


def worst_error(case: GpuCase, device: str, dtype: torch.dtype, name: str) -> tuple[float, float]:
    """Result and all gradients against float64: the largest rms error over its bound, and that of plain torch.

    The bound is twice plain torch's error in the same precision plus four units in the last place: above 1 is wrong.
    """
    args, reference = case.make(device, dtype), REFERENCES[case.op]
    exact = tree_map(lambda x: x.double() if _is_float(x) else x, args)
    grad = torch.randn(_first(reference(*args)).shape, device=device)
    oracle, plain = (_with_gradients(case.constant, reference, x, grad) for x in (exact, args))
    got = _with_gradients(case.constant, partial(_forced, name, case.function), args, grad)
    worst = 0.0
    for x, y, z in zip(got, plain, oracle, strict=True):
        little = 4 * torch.finfo(x.dtype).eps * _rms(z)
        worst = max(worst, _rms(x - z) / max(2 * _rms(y - z) + little, 1e-300))
    return worst, max(_rms(y - z) / max(_rms(z), 1e-300) for y, z in zip(plain, oracle, strict=True))


def _forced(name: str, function: Callable[..., Any], *args: object) -> Any:
    return on_backend(name, function, args)


def _with_gradients(
    constant: Sequence[int], function: Callable[..., Any], args: tuple, grad: Tensor | None = None
) -> list[Tensor]:
    """The result, and the gradients of all floating-point arguments but those at the places `constant`."""
    args = tuple(x if i in constant else tree_map(_leaf, x) for i, x in enumerate(args))
    out = _first(function(*args))
    leaves = [x for x in tree_leaves(args) if _is_float(x) and x.requires_grad]
    grad = None if grad is None else grad.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad, materialize_grads=True)]


def _leaf(x: object) -> object:
    return x.detach().requires_grad_() if _is_float(x) else x


def _first(out: Any) -> Tensor:
    """What gradients are taken of: a training loss may come with the statistics of its batch."""
    return out[0] if isinstance(out, tuple) else out


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
