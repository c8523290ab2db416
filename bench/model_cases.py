"""Whole-model cases: one Algorithm 1 step and routed inference, `levit.reference` against `levit.LEViT`.

Sizes are split-mnist's. Weights are random (speed does not depend on them), running batch-norm statistics too, so that
a model which folds them wrongly fails its check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import levit
from bench import work
from bench.harness import Case
from levit.conv_vae import conv_vae_loss
from levit.expert import Expert

UPDATES = 3
STREAM_BATCH = 10
PRESET = "split-mnist"
NEVER = 1e9  # a threshold that no distance reaches: the rule is asked at every step and never fires
LOGITS = {"fp32": dict(rtol=1e-4, atol=1e-5), "bf16": dict(rtol=1e-2, atol=5e-3)}  # how close they have to be
SINGLE_ROUTES = 8  # a single image has one route; the mean over this many stands for the uniform one


def config(experts: int, precision: str = "fp32") -> levit.LEViTConfig:
    """The preset, in a state that lasts: a full memory of K experts neither grows nor empties.

    With one expert a full memory always expands, so there growth is forbidden, and no check takes place. Rule and
    routing are the published ones: what ours cost is the same for both models.
    """
    limit = 1 if experts == 1 else None
    published = dict(criterion="latent", gamma=NEVER, routing="vae", calibration=False)
    return levit.LEViTConfig.preset(PRESET, max_experts=limit, precision=precision, **published)


def build(kind: str, experts: int, precision: str = "fp32") -> torch.nn.Module:
    """`reference` or `fused` with K experts; the same weights for both. The reference knows float32 only."""
    cfg = config(experts, precision)
    reference = levit.reference.LEViT(cfg)
    for _ in range(experts - 1):
        reference.add_expert()
    state = reference.state_dict()
    generator = torch.Generator().manual_seed(1)
    for name, value in state.items():
        if name.endswith("running_mean"):
            value.copy_(0.1 * torch.randn(value.shape, generator=generator))
        elif name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=generator))
    if kind == "reference":
        return reference
    fused = levit.LEViT(cfg)
    fused.load_state_dict(state)
    return fused


class Step(NamedTuple):
    """What a step leaves to check. Adam moves every gate by about its rate, so each frozen expert shows in its gate.
    `stream` is where it was taken, for what there is to see until the next step.
    """

    loss: float
    distances: Tensor
    gates: Tensor
    stream: Stream


class Stream:
    """A learner in its steady state, fed with the same random images whatever drives it."""

    def __init__(
        self, kind: str, experts: int, precision: str = "fp32", device: str = "cpu", graph: bool = False
    ) -> None:
        model = build(kind, experts, precision).to(device)
        self.learner = levit.Learner(model, updates_per_batch=UPDATES, graph=graph)
        self.device = device
        self.generator = torch.Generator().manual_seed(2)
        self.cfg = model.cfg
        self.learner.observe(*self._batch(self.cfg.memory_size - STREAM_BATCH))
        self.batches = [self._batch(STREAM_BATCH) for _ in range(16)]
        self.steps = 0

    def step(self) -> Step:
        """Ten images in, three updates, one check, ten images out."""
        event = self.learner.observe(*self.batches[self.steps % len(self.batches)])
        self.steps += 1
        distances = torch.zeros(0) if event.distances is None else event.distances
        return Step(event.loss, distances, self.learner.model.active.gates.detach().clone(), self)

    @torch.no_grad()
    def frozen_features(self, slots: Tensor) -> Tensor:
        """What training takes the frozen experts to say of stored images [B]: [B, K-1, N, E]."""
        stored = self.learner.cache.rows(slots)
        if stored is None:
            return self.learner.model.features(self.learner.memory.images[slots])[:, :-1]
        return stored.features[slots].float()

    @torch.no_grad()
    def frozen_codes(self, slots: Tensor) -> Tensor:
        """What the rule takes the frozen VAEs to say of stored images [B]: [B, K-1, L]."""
        model, memory = self.learner.model, self.learner.memory
        kept = getattr(self.learner.cache, "codes", None)
        if kept is not None:
            return kept[:, slots].transpose(0, 1)
        encoded = [expert.vae.encode(memory.images[slots]) for expert in list(model.experts)[:-1]]
        noise = model.frozen_noise(memory.positions[slots])
        return torch.stack([mu + log_sigma.exp() * e for (mu, log_sigma), e in zip(encoded, noise, strict=True)], dim=1)

    def _batch(self, count: int) -> tuple[Tensor, Tensor]:
        images = _images(self.cfg, count, self.generator)
        labels = torch.randint(self.cfg.num_classes, (count,), generator=self.generator)
        return images.to(self.device), labels.to(self.device)


def step(experts: int, precision: str = "fp32") -> Case:
    """One Algorithm 1 step with a full memory."""
    variants = {kind: Stream(kind, experts, precision).step for kind in ("reference", "fused")}
    needed = work.step(config(experts), experts, UPDATES, STREAM_BATCH)
    return Case(
        name="step",
        size=f"K={experts}{_suffix(precision)}",
        variants=variants,
        baseline="reference",
        flops=needed.flops,
        bytes=needed.bytes,
        check=_same_step if precision == "fp32" else _close_step,
    )


def growth(few: int, many: int) -> Case:
    """What a step of the fused model costs with many experts more than with few; both checked against the reference."""
    sizes = {f"fused K={k}": k for k in (few, many)}
    needed = {name: work.step(config(k), k, UPDATES, STREAM_BATCH) for name, k in sizes.items()}
    expected = {name: Stream("reference", k).step for name, k in sizes.items()}
    return Case(
        name="growth",
        size=f"K={few},{many}",
        variants={name: Stream("fused", k).step for name, k in sizes.items()},
        baseline=f"fused K={few}",
        flops={name: w.flops for name, w in needed.items()},
        bytes={name: w.bytes for name, w in needed.items()},
        check=_same_step,
        expected=lambda name: expected[name](),
    )


def growth_floor(few: int, many: int) -> work.Work:
    """What the additional experts of `growth` cost at least: stored rows to read, new images to compute."""
    less, more = (work.step(config(k), k, UPDATES, STREAM_BATCH) for k in (few, many))
    return more - less


def conv_vae(batch: int) -> Case:
    """One training loss of the CIFAR preset's VAE with all its gradients: the plain module and the kernels."""
    cfg = levit.LEViTConfig.preset("split-cifar10")
    generator = torch.Generator().manual_seed(4)
    vae = Expert.create(cfg, 0).vae
    images, noise = _images(cfg, batch, generator), torch.randn(batch, cfg.latent_dim, generator=generator)

    def trained(loss: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        mean = loss(vae, images, noise).mean()
        return mean.detach(), *torch.autograd.grad(mean, list(vae.parameters()))

    return Case(
        name="conv_vae",
        size=f"B={batch}",
        variants={"reference": partial(trained, type(vae).loss), "fused": partial(trained, conv_vae_loss)},
        baseline="reference",
        check=partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3),
    )


def inference(experts: int, batch: int, to_last: bool = False, precision: str = "fp32") -> Case:
    """Routed inference with routes forced to be uniform over the experts, or all to the last one, whose images need
    them all; the real routes are computed all the same.
    """
    routes = torch.full((batch,), experts - 1) if to_last else uniform_routes(experts, batch)
    variants = {kind: predictor(build(kind, experts, precision), routes, batch) for kind in ("reference", "fused")}
    calls = len(routes) // batch
    needed = work.routed_inference
    total = sum((needed(config(experts), experts, part.tolist()) for part in routes.split(batch)), work.Work())
    return Case(
        name="inference",
        size=f"K={experts} B={batch}" + (" last" if to_last else "") + _suffix(precision),
        variants=variants,
        baseline="reference",
        flops=total.flops / calls,
        bytes=total.bytes / calls,
        check=partial(torch.testing.assert_close, **LOGITS[precision]),
        calls=calls,
    )


def uniform_routes(experts: int, batch: int) -> Tensor:
    """Every expert equally often, in random order, [B]; a single image is predicted with spread routes in turn."""
    count = batch if batch > 1 else min(SINGLE_ROUTES, experts)
    routes = (torch.arange(count) + 1) * experts // count - 1 if batch == 1 else torch.arange(count) * experts // count
    return routes[torch.randperm(count, generator=torch.Generator().manual_seed(3))]


def prepare_inference(kind: str, experts: int, batch: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """For `bench.memory`: (warm-up on a few images, one call of routed inference)."""
    routes = uniform_routes(experts, batch)
    model = build(kind, experts)
    few = min(8, batch)
    return predictor(model, routes[:few], few), predictor(model, routes, batch)


def predictor(model: torch.nn.Module, routes: Tensor, batch: int) -> Callable[[], Tensor]:
    """Routed inference of as many images, `batch` at a time, that computes its own routes and then takes these."""
    images = _images(model.cfg, len(routes), torch.Generator().manual_seed(4))
    score = type(model).route

    @torch.no_grad()
    def predict() -> Tensor:
        logits = []
        for part, forced in zip(images.split(batch), routes.split(batch), strict=True):

            def route(inputs: Tensor, forced: Tensor = forced) -> Tensor:
                score(model, inputs)
                return forced

            model.route = route
            logits.append(model(part))
        return torch.cat(logits)

    return predict


def _suffix(precision: str) -> str:
    return "" if precision == "fp32" else f" {precision}"


def _same_step(output: Step, expected: Step) -> None:
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(output.distances, expected.distances, rtol=1e-5, atol=0)
    torch.testing.assert_close(output.gates, expected.gates, rtol=0, atol=1e-4)


def _close_step(output: Step, expected: Step) -> None:
    """Where frozen features, codes and what learns are rounded. A gate does not tell a wrong expert from a rounded one,
    since Adam takes whole steps where its gradient is about zero, nor does a distance: features and codes themselves
    have to be close, expert by expert.
    """
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-3, atol=0)
    torch.testing.assert_close(output.distances, expected.distances, rtol=2e-3, atol=0)
    some = torch.arange(min(64, output.stream.cfg.memory_size))
    for kept in (Stream.frozen_features, Stream.frozen_codes):
        want = kept(expected.stream, some).flatten(2)
        error = (kept(output.stream, some).flatten(2) - want).norm(dim=(0, 2)) / want.norm(dim=(0, 2))
        torch.testing.assert_close(error, torch.zeros_like(error), rtol=0, atol=0.01)


def _images(cfg: levit.LEViTConfig, count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, cfg.channels, cfg.image_size, cfg.image_size, generator=generator)
