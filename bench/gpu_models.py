"""The whole model on a GPU: the fused one against the reference, in numbers and in milliseconds."""

from __future__ import annotations

import statistics
import time

import torch

from bench import model_cases
from bench.gpu_report import Report

EXPERTS = 32


def parity(found: Report, deadline: float) -> None:
    """Features, VAE losses and routed logits of both models with the same weights."""
    reference, fused = (model_cases.build(kind, 3).cuda() for kind in ("reference", "fused"))
    cfg = model_cases.config(3)
    images = torch.rand(16, cfg.channels, cfg.image_size, cfg.image_size, device="cuda")
    for name in ("features", "elbo_loss", "forward"):
        with torch.no_grad():
            got, want = getattr(fused, name)(images), getattr(reference, name)(images)
        error = float((got - want).abs().max() / want.abs().max())
        found.add("parity", what=name, error=f"{error:.2e}", status="ok" if error < 1e-4 else "wrong")


def step(found: Report, deadline: float, device: str = "cuda", repeats: int = 10) -> None:
    """Wall time of one Algorithm 1 step, its decision read on the CPU as in any run; the models take turns."""
    streams = {
        "reference": model_cases.Stream("reference", EXPERTS, device=device),
        "fused": model_cases.Stream("fused", EXPERTS, device=device),
    }
    if device == "cuda":
        streams["fused, graph=True"] = model_cases.Stream("fused", EXPERTS, device=device, graph=True)
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for turn in range(2 + repeats):  # the first two compile, capture and fill caches
        if time.monotonic() > deadline:
            break
        for name, stream in streams.items():
            began = time.perf_counter()
            stream.step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn > 1:
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items() if times}
    for name, median in medians.items():
        row = {"median_ms": round(median * 1e3, 2), "over_reference": round(medians["reference"] / median, 2)}
        found.add("step", model=name, experts=EXPERTS, **row)
