"""What `python -m bench.gpu` checks and times: the ops at published sizes, and who may compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import levit_kernels
from bench import task_cases, work
from levit import LEViTConfig
from levit_kernels import gates as gating
from levit_kernels.backends import registry
from levit_kernels.dkf_fuse import dkf_fuse_reference
from levit_kernels.elbo_loss import elbo_loss_reference
from levit_kernels.expansion_distances import expansion_distances_reference
from levit_kernels.expert_attention import expert_attention_reference
from levit_kernels.latent_distance import latent_distance_reference
from levit_kernels.task_attention import task_attention_reference

CFG = LEViTConfig.preset("split-mnist")
PIXELS = CFG.channels * CFG.image_size**2
BACKENDS = ("triton", "torch", "reference")
UNPROVEN = ("cuda",)  # no GPU has run these kernels yet: they come last, where a fault can spoil nothing else
REFERENCES = {
    "expert_attention": expert_attention_reference,
    "dkf_fuse": dkf_fuse_reference,
    "latent_distance": latent_distance_reference,
    "expansion_distances": expansion_distances_reference,
    "elbo_loss": elbo_loss_reference,
    "task_attention": task_attention_reference,
}


@dataclass(frozen=True)
class GpuCase:
    """An op at one size; `make(device, dtype)` gives its arguments, flops and bytes are the least that it needs."""

    op: str
    size: str
    make: Callable[[str, torch.dtype], tuple]
    flops: float
    numbers: float  # read and written; times the size of the dtype these are the bytes

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(levit_kernels, self.op)

    def on_backends(self, names: Sequence[str], args: tuple) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name, call) of those that take the call."""
        for name in names:
            if refusal(name, self.op, args) is None:
                yield name, partial(on_backend, name, self.function, args)

    def variants(self, args: tuple) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name, call): every backend that takes the call, torch.compile of the reference, SDPA where it applies."""
        yield from self.on_backends(BACKENDS, args)
        if self.op != "task_attention":  # whose passes, one per token, take the compiler minutes
            compiled = torch.compile(REFERENCES[self.op], fullgraph=True)
            yield "compiled reference", lambda: compiled(*args)
        if self.op == "expert_attention":
            yield "sdpa", lambda: attention_by_sdpa(*args)
            compiled_sdpa = torch.compile(attention_by_sdpa, fullgraph=True)
            yield "compiled sdpa", lambda: compiled_sdpa(*args)


def refusal(name: str, op: str, args: tuple) -> str | None:
    """Why a backend does not take a call even where it is forced, or None."""
    with levit_kernels.use_backend(name):
        return registry.backends()[name].reason_against(op, args)


def on_backend(name: str, function: Callable[..., Tensor], args: tuple) -> Tensor:
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
    args = case.make(device, dtype)
    exact = tree_map(lambda x: x.double() if _is_float(x) else x, args)
    grad = torch.randn(REFERENCES[case.op](*args).shape, device=device)
    oracle, plain = (_with_gradients(REFERENCES[case.op], x, grad) for x in (exact, args))
    got = _with_gradients(partial(_forced, name, case.function), args, grad)
    worst = 0.0
    for x, y, z in zip(got, plain, oracle, strict=True):
        little = 4 * torch.finfo(x.dtype).eps * _rms(z)
        worst = max(worst, _rms(x - z) / max(2 * _rms(y - z) + little, 1e-300))
    return worst, max(_rms(y - z) / max(_rms(z), 1e-300) for y, z in zip(plain, oracle, strict=True))


def _forced(name: str, function: Callable[..., Tensor], *args: object) -> Tensor:
    return on_backend(name, function, args)


def _with_gradients(function: Callable[..., Tensor], args: tuple, grad: Tensor) -> list[Tensor]:
    args = tree_map(lambda x: x.detach().requires_grad_() if _is_float(x) else x, args)
    out = function(*args)
    leaves = [x for x in tree_leaves(args) if _is_float(x)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype), materialize_grads=True)]


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


class _Random:
    """Normal numbers on a device, scaled by fan-in."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.options = {"device": device, "dtype": dtype}
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, fan_in: int = 1, **options: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, **(self.options | options)) * fan_in**-0.5


def _attention(experts: int, batch: int, patch_dim: int, device: str, dtype: torch.dtype) -> tuple:
    new, width, heads, depth = _Random(device, dtype), CFG.embed_dim, CFG.num_heads, CFG.head_dim
    return (
        new(batch, CFG.num_patches, patch_dim),
        new(experts, patch_dim, width, fan_in=patch_dim),
        new(experts, width),
        new(experts, width, 3, heads, depth, fan_in=width),
        new(experts, 3, heads, depth),
        torch.softmax(new(experts, dtype=torch.float32), 0),
        0.2,
    )


def _fuse(experts: int, batch: int, slots: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    gates = torch.softmax(new(experts, dtype=torch.float32), 0)
    index = torch.randint(0, slots, (batch,), generator=new.generator, device=device)
    return new(slots, experts, CFG.num_patches, CFG.feature_dim), gates, index


def _codes(experts: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    return new(experts, CFG.memory_size, CFG.latent_dim), new(CFG.memory_size, CFG.latent_dim)


def _layers(new: _Random, experts: int, *sizes: tuple[int, int]) -> list[Tensor]:
    """Weights in the layout of nn.Linear, and biases."""
    return [
        x
        for inputs, outputs in sizes
        for x in (new(experts, outputs, inputs, fan_in=inputs).transpose(1, 2), new(experts, outputs))
    ]


def _encoder(new: _Random, experts: int) -> list[Tensor]:
    return _layers(new, experts, (PIXELS, 200), (200, 200), (200, CFG.latent_dim), (200, CFG.latent_dim))


def _images(experts: int, device: str, dtype: torch.dtype) -> tuple:
    new, size = _Random(device, dtype), CFG.memory_size
    noise = new(experts, size, CFG.latent_dim)
    return new(size, PIXELS), _encoder(new, experts), new(size, CFG.latent_dim), noise


def _routing(experts: int, batch: int, device: str, dtype: torch.dtype) -> tuple:
    new = _Random(device, dtype)
    decoder = _layers(new, experts, (CFG.latent_dim, 200), (200, 200), (200, PIXELS))
    return new(batch, PIXELS), _encoder(new, experts), decoder, CFG.beta, None


def _tasks(tokens: int, batch: int, device: str, dtype: torch.dtype) -> tuple:
    new, width = _Random(device, dtype), task_cases.WIDTH
    weights = [new(width, width, fan_in=width) for _ in range(4)]
    return new(tokens, width), new(batch, task_cases.PATCHES, width), *weights, new(width), task_cases.HEADS, None


def _task_case(tokens: int, batch: int) -> GpuCase:
    needed = task_cases.attention_work(tokens, batch)
    return GpuCase(
        "task_attention", f"cifar T={tokens} B={batch}", partial(_tasks, tokens, batch), needed.flops, needed.bytes / 4
    )


def cases(experts: int = 32, batch: int = 64) -> list[GpuCase]:
    """Most important first."""
    store = batch * (experts - 1) * CFG.num_patches * CFG.feature_dim
    codes = experts * CFG.memory_size * CFG.latent_dim
    per_image, weights = work.attention_flops(CFG), work.attention_weights(CFG)
    found = [
        GpuCase(
            "expert_attention",
            f"mnist K={experts} B={batch}",
            partial(_attention, experts, batch, CFG.patch_dim),
            experts * batch * per_image,
            experts * weights,
        ),
        GpuCase("dkf_fuse", f"K={experts - 1} B={batch}", partial(_fuse, experts - 1, batch, 2000), 2 * store, store),
        GpuCase("latent_distance", f"K={experts} M=2000", partial(_codes, experts), 3 * codes, codes),
        GpuCase(
            "elbo_loss",
            f"K={experts} B=256",
            partial(_routing, experts, 256),
            2 * experts * 256 * work.vae_weights(CFG),
            experts * work.vae_weights(CFG),
        ),
        GpuCase(
            "expansion_distances",
            f"K={experts} M=2000",
            partial(_images, experts),
            2 * experts * CFG.memory_size * work.encoder_weights(CFG),
            experts * work.encoder_weights(CFG),
        ),
        *(_task_case(tokens, 2 * batch) for tokens in (50, 5)),  # over projected patches, and folded
    ]
    cifar = per_image + 2 * CFG.num_patches * (192 - CFG.patch_dim) * CFG.embed_dim
    return [
        *found,
        GpuCase(
            "expert_attention",
            f"cifar K={experts} B=256",
            partial(_attention, experts, 256, 192),
            experts * 256 * cifar,
            experts * weights,
        ),
    ]
