"""torch.compile (Inductor) as the competitor: the reference compiled by it beside the reference and the fused model.

Compilation takes minutes: these cases run when they are named (`bench.cases.select`) or a bar asks for them, and with
one thread only, since Dynamo compiles anew for every number of threads. The first call's seconds are those of the
compilation (`Row.first`).

Dynamic shapes are off and the images of every expert equally many, so nothing is ever compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import levit
from bench import model_cases
from bench.harness import Case

THREADS = (1,)
TOGETHER = {8: 8, 32: 1}
"""Experts of one graph, by K. One graph of all takes minutes for 8 and would take 20 or more for 32; those get a graph
each, as they share nothing but the stacking of what they say, and Inductor reuses C++ code that it compiled before."""


def inference(experts: int, batch: int) -> Case:
    """Routed inference, uniform routes; the competitor's weights are frozen into its graphs."""
    case = model_cases.inference(experts, batch)
    model = compile_inference(model_cases.build("reference", experts), TOGETHER.get(experts, experts))
    call = model_cases.predictor(model, model_cases.uniform_routes(experts, batch), batch)

    def frozen() -> Tensor:
        with torch._inductor.config.patch(freezing=True):  # read by Dynamo as well, so torch.compile's options won't do
            return call()

    return _beside(case, frozen)


def step(experts: int) -> Case:
    """One Algorithm 1 step with a full memory: the training loss, its gradients, Adam and every encoder compiled."""
    stream = model_cases.Stream("reference", experts)
    compile_training(stream.learner)
    return _beside(model_cases.step(experts), stream.step)


def compile_inference(model: levit.reference.LEViT, together: int) -> levit.reference.LEViT:
    """Everything that it computes, with `together` experts in a graph; what depends on the routes stays Python.

    Dynamo would break its graphs there too, but would take the loop over the experts for ever the same code.
    """
    graph = partial(torch.compile, dynamic=False, fullgraph=True, isolate_recompiles=True)

    def stacked(one: Callable[[levit.expert.Expert, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def of(group: list[levit.expert.Expert]) -> Callable[[Tensor], Tensor]:
            return graph(lambda images: torch.stack([one(expert, images) for expert in group], dim=1))

        experts = list(model.experts)
        graphs = [of(experts[k : k + together]) for k in range(0, len(experts), together)]
        return lambda images: torch.cat([call(images) for call in graphs], dim=1)

    def answer(k: int) -> Callable[[Tensor, Tensor], Tensor]:
        return graph(lambda evaluated, rows: model.experts[k].head(model.fuse(evaluated[rows, : k + 1])))

    answers = [answer(k) for k in range(model.num_experts)]

    def apply_experts(images: Tensor, routes: Tensor) -> Tensor:
        evaluated = model.features(images)
        logits = evaluated.new_empty(len(images), model.cfg.num_classes)
        for k in routes.unique().tolist():
            rows = (routes == k).nonzero().squeeze(1)
            logits[rows] = answers[k](evaluated, rows)
        return logits

    model.features = stacked(lambda expert, images: levit.reference.features(expert, images, model.cfg))
    model.elbo_loss = stacked(lambda expert, images: expert.vae.loss(images))
    model.apply_experts = apply_experts
    return model


def compile_training(learner: levit.Learner) -> None:
    """What a step spends its time on; drawing minibatches and noise, and the memory, stay Python."""
    graph = partial(torch.compile, dynamic=False, isolate_recompiles=True)
    learner.model.training_loss = graph(learner.model.training_loss)
    learner.optimizer.step = graph(learner.optimizer.step)
    for expert in learner.model.experts:
        expert.vae.encode = graph(expert.vae.encode)


def _beside(case: Case, compiled: Callable[[], object]) -> Case:
    return replace(case, name=f"compiled {case.name}", variants=case.variants | {"compile": compiled}, threads=THREADS)
