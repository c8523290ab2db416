"""The ops of levit_kernels at split-mnist's sizes: every backend that takes the call, against the op's reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import levit_kernels
from bench import work
from bench.harness import Case
from levit import LEViTConfig
from levit_kernels.backends import BackendError
from levit_kernels.expert_attention import expert_attention_reference
from levit_kernels.huge_pages import huge_pages

BACKENDS = ("reference", "torch", "cpu")
SLOTS = 256  # of the memory behind dkf_fuse: with 31 experts 152 MB, beyond any cache
FUSE_BATCH = 64
CLOSE, HALF = dict(rtol=1e-3, atol=1e-4), dict(rtol=2e-2, atol=2e-2)  # results in bfloat16, by plain torch too
COLD_SETS = 8  # of 32 experts 97 MB

CFG = LEViTConfig.preset("split-mnist")


def expert_attention(experts: int, batch: int, backward: bool = False, half: bool = False) -> Case:
    """Gated sum over K experts; `backward`: the active expert in training, with all its gradients; `half`: in bfloat16,
    against a loop in float32, weights in the order of nn.Linear as frozen experts keep them.
    """
    make = _Random()
    width, depth, heads = CFG.embed_dim, CFG.head_dim, CFG.num_heads
    args = [
        make(batch, CFG.num_patches, CFG.patch_dim),
        make(experts, CFG.patch_dim, width, fan_in=CFG.patch_dim),
        make(experts, width),
        make(experts, width, 3, heads, depth, fan_in=width),
        make(experts, 3, heads, depth),
    ]
    gates = None if backward else torch.softmax(make(experts), 0)
    number = 2 if half else work.FLOAT
    needed = experts * work.Work(batch * work.attention_flops(CFG), number * work.attention_weights(CFG))
    if backward:
        needed = (1 + work.BACKWARD) * needed
        for weight in args[1:]:
            weight.requires_grad_()
    size = f"K={experts} B={batch}" + (" fwd+bwd" if backward else "") + (" bf16" if half else "")
    loop = {} if backward else {"loop": partial(_expert_by_expert, *args, gates)}
    if half:
        args[1], args[3] = _inputs_last(args[1]), _inputs_last(args[3])
        args = [x.bfloat16() for x in args]
    call = partial(levit_kernels.expert_attention, *args, gates)
    return _case("expert_attention", size, call, needed, args[1:], others=loop, close=HALF if half else CLOSE)


def cold_expert_attention(experts: int, batch: int, linear: bool = True) -> Case:
    """The gated sum with weights that must come from memory: one call goes through `COLD_SETS` sets of experts.
    `linear`: in the order of nn.Linear, as frozen experts keep them; else contiguous.
    """
    make = _Random()
    width, depth, heads = CFG.embed_dim, CFG.head_dim, CFG.num_heads
    patches = make(batch, CFG.num_patches, CFG.patch_dim)
    gates = torch.softmax(make(experts), 0)
    laid_out = _inputs_last if linear else torch.Tensor.contiguous
    sets = [
        [
            laid_out(make(experts, CFG.patch_dim, width, fan_in=CFG.patch_dim)),
            make(experts, width),
            laid_out(make(experts, width, 3, heads, depth, fan_in=width)),
            make(experts, 3, heads, depth),
        ]
        for _ in range(COLD_SETS)
    ]

    def call() -> list[Tensor]:
        return [levit_kernels.expert_attention(patches, *weights, gates) for weights in sets]

    needed = experts * work.Work(batch * work.attention_flops(CFG), work.FLOAT * work.attention_weights(CFG))
    return _case(
        "expert_attention",
        f"K={experts} B={batch} cold" + ("" if linear else " contiguous"),
        call,
        needed,
        calls=COLD_SETS,
    )


def dkf_fuse(experts: int, backward: bool = False) -> Case:
    """A minibatch gathered from the store and fused; `backward`: the gradient of the gates too, a second read.

    The store lies in huge pages, as the learner's does. One call goes through all slots, one minibatch after the
    other, so that none finds its rows in the cache.
    """
    make = _Random()
    store = torch.empty(SLOTS, experts, CFG.num_patches, CFG.feature_dim)
    huge_pages(store)
    store.normal_(generator=make.generator)
    gates = torch.softmax(make(experts), 0).requires_grad_(backward)
    minibatches = torch.randperm(SLOTS, generator=make.generator).split(FUSE_BATCH)

    def call() -> list[Tensor]:
        return [levit_kernels.dkf_fuse(store, gates, index) for index in minibatches]

    values = FUSE_BATCH * experts * CFG.num_patches * CFG.feature_dim
    needed = (2 if backward else 1) * work.Work(2 * values, work.FLOAT * values)
    size = f"K={experts} B={FUSE_BATCH}" + (" fwd+bwd" if backward else "")
    return _case("dkf_fuse", size, call, needed, [gates], calls=len(minibatches))


def latent_distance(experts: int) -> Case:
    """Equation 6 over stored codes of the whole memory."""
    make = _Random()
    codes = make(experts, CFG.memory_size, CFG.latent_dim)
    query = make(CFG.memory_size, CFG.latent_dim)
    needed = work.Work(3 * codes.numel(), work.FLOAT * (codes.numel() + query.numel()))
    call = partial(levit_kernels.latent_distance, codes, query)
    return _case("latent_distance", f"K={experts} M={CFG.memory_size}", call, needed)


def expansion_distances(experts: int) -> Case:
    """Equation 6 from the images of the whole memory, nothing stored."""
    make = _Random()
    images = torch.rand(CFG.memory_size, _pixels(), generator=make.generator)
    query = make(CFG.memory_size, CFG.latent_dim)
    noise = make(experts, CFG.memory_size, CFG.latent_dim)
    weights = work.encoder_weights(CFG)
    needed = experts * work.Work(2 * CFG.memory_size * weights, work.FLOAT * weights)
    call = partial(levit_kernels.expansion_distances, images, _encoder(make, experts), query, noise)
    return _case("expansion_distances", f"K={experts} M={CFG.memory_size}", call, needed)


def elbo_loss(experts: int, batch: int) -> Case:
    """Routing scores of a batch under all VAEs."""
    make = _Random()
    images = torch.rand(batch, _pixels(), generator=make.generator)
    weights = work.vae_weights(CFG)
    needed = experts * work.Work(2 * batch * weights, work.FLOAT * weights)
    call = partial(levit_kernels.elbo_loss, images, _encoder(make, experts), _decoder(make, experts), CFG.beta)
    return _case("elbo_loss", f"K={experts} B={batch}", call, needed)


OPS: dict[str, Callable[[], Case]] = {
    "expert_attention K=32 B=64": partial(expert_attention, 32, 64),
    "expert_attention K=32 B=64 bf16": partial(expert_attention, 32, 64, half=True),
    "expert_attention K=32 B=1": partial(expert_attention, 32, 1),
    "expert_attention K=32 B=1 cold": partial(cold_expert_attention, 32, 1),
    "expert_attention K=32 B=1 cold contiguous": partial(cold_expert_attention, 32, 1, linear=False),
    "expert_attention K=1 B=64 fwd+bwd": partial(expert_attention, 1, 64, backward=True),
    "dkf_fuse K=8 B=64": partial(dkf_fuse, 8),
    "dkf_fuse K=31 B=64": partial(dkf_fuse, 31),
    "dkf_fuse K=31 B=64 fwd+bwd": partial(dkf_fuse, 31, backward=True),
    "latent_distance K=31 M=2000": partial(latent_distance, 31),
    "expansion_distances K=7 M=2000": partial(expansion_distances, 7),
    "elbo_loss K=32 B=256": partial(elbo_loss, 32, 256),
    "elbo_loss K=32 B=1": partial(elbo_loss, 32, 1),
}


class _Random:
    """Seeded standard normal tensors; weights are scaled by their fan-in, so that activations stay of order one."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, *shape: int, fan_in: int = 1) -> Tensor:
        return torch.randn(shape, generator=self.generator).div_(fan_in**0.5)


def _case(
    name: str,
    size: str,
    call: Callable[[], Any],
    needed: work.Work,
    leaves: Sequence[Tensor] = (),
    calls: int = 1,
    others: Mapping[str, Callable[[], Any]] | None = None,
    close: Mapping[str, float] = CLOSE,
) -> Case:
    """The call on every backend that takes it, and what else does the same."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def with_gradients() -> Any:
        output = call()
        if not wanted:
            return output
        outputs = output if isinstance(output, list) else [output]
        return outputs, torch.autograd.grad(outputs, wanted, [torch.ones_like(part) for part in outputs])

    variants, absent = dict(others or {}), {}
    for backend in BACKENDS:
        variant = partial(_on, backend, with_gradients)
        try:
            variant()
        except BackendError as error:
            absent[backend] = str(error)
            continue
        except Exception:  # the check will meet it again and report it
            pass
        variants[backend] = variant
    return Case(
        name=name,
        size=size,
        variants=variants,
        baseline="reference",
        flops=needed.flops,
        bytes=needed.bytes,
        check=partial(torch.testing.assert_close, **close),
        calls=calls,
        absent=absent,
    )


def _inputs_last(weight: Tensor) -> Tensor:
    """The same [K, inputs, ...] with inputs consecutive in memory."""
    return weight.movedim(1, -1).contiguous().movedim(-1, 1)


def _expert_by_expert(patches: Tensor, *weights_and_gates: Tensor) -> Tensor:
    """The gated sum as a loop over experts in plain torch."""
    total = 0.0
    for of_expert in zip(*(tensor.split(1) for tensor in weights_and_gates), strict=True):
        total = total + expert_attention_reference(patches, *of_expert)
    return total


def _on(backend: str, call: Callable[[], Any]) -> Any:
    with levit_kernels.use_backend(backend):
        return call()


def _encoder(make: _Random, experts: int) -> list[Tensor]:
    first, second = CFG.vae_hidden
    sizes = ((_pixels(), first), (first, second), (second, CFG.latent_dim), (second, CFG.latent_dim))
    return _layers(make, experts, sizes)


def _decoder(make: _Random, experts: int) -> list[Tensor]:
    first, second = CFG.vae_hidden
    return _layers(make, experts, ((CFG.latent_dim, first), (first, second), (second, _pixels())))


def _layers(make: _Random, experts: int, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Weights [K, inputs, outputs] and biases [K, outputs] of layers, in turn."""
    tensors = []
    for inputs, outputs in sizes:
        tensors += [make(experts, inputs, outputs, fan_in=inputs), 0.1 * make(experts, outputs)]
    return tensors


def _pixels() -> int:
    return CFG.channels * CFG.image_size**2
