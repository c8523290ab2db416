"""The cases' declared work against torch's own counter, and what their variants do."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import levit
from bench import model_cases, op_cases, work
from bench.harness import run
from levit_kernels.backends.registry import BackendError, forced_here

CFG = levit.LEViTConfig.preset("digits")


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(6, CFG.channels, CFG.image_size, CFG.image_size, generator=torch.Generator().manual_seed(0))


def counted(call: object) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_of_each_part_are_those_that_torch_counts(images: torch.Tensor) -> None:
    model = levit.reference.LEViT(CFG)
    head = counted(lambda: model.forward_expert(images, 0)) - counted(lambda: model.features(images))
    assert counted(lambda: model.features(images)) == len(images) * work.attention_flops(CFG)
    assert counted(lambda: model.elbo_loss(images)) == len(images) * 2 * work.vae_weights(CFG)
    assert counted(lambda: model.active.vae.encode(images)) == len(images) * 2 * work.encoder_weights(CFG)
    assert head == len(images) * 2 * work.head_weights(CFG)


def test_weights_are_those_of_the_model() -> None:
    expert = levit.reference.LEViT(CFG).active

    def matrices(*modules: torch.nn.Module) -> int:
        return sum(p.numel() for m in modules for p in m.parameters() if p.dim() == 2)

    assert work.attention_weights(CFG) == matrices(expert.embed, expert.qkv)
    assert work.vae_weights(CFG) == matrices(expert.vae)
    assert work.head_weights(CFG) == matrices(expert.head)


def test_flops_of_a_step_with_one_expert_are_those_that_torch_counts() -> None:
    rows, updates = 8, 3
    cfg = levit.LEViTConfig.preset("digits", train_batch=rows)
    model = levit.reference.LEViT(cfg)
    images = torch.rand(rows, cfg.channels, cfg.image_size, cfg.image_size)
    labels = torch.arange(rows) % cfg.num_classes
    update = counted(lambda: model.training_loss(images, labels).backward())
    check = cfg.memory_size * 2 * work.encoder_weights(cfg)
    assert work.step(cfg, experts=1, updates=updates, batch=10).flops == updates * update + check


def test_each_further_expert_costs_a_step_what_it_stores_and_reads() -> None:
    rows, codes = 3 * CFG.train_batch, CFG.memory_size * CFG.latent_dim
    values = CFG.num_patches * CFG.feature_dim
    one, three = (work.step(CFG, k, updates=3, batch=10) for k in (1, 3))
    new_images = 10 * (work.attention_flops(CFG) + 2 * work.encoder_weights(CFG))
    assert three.flops - one.flops == 2 * (new_images + rows * 4 * values + 3 * codes)
    read = 2 * rows * values + codes + work.attention_weights(CFG) + work.encoder_weights(CFG)
    assert three.bytes - one.bytes == 2 * 4 * read


def test_floor_of_routed_inference_leaves_out_experts_past_the_chosen_one(images: torch.Tensor) -> None:
    needed = work.routed_inference(CFG, experts=3, routes=[0, 2])
    scores, heads = 3 * 2 * work.vae_weights(CFG), 2 * work.head_weights(CFG)
    assert needed.flops == 2 * (scores + heads) + (1 + 3) * work.attention_flops(CFG)
    assert needed.seconds(gflops=1e-9, gbs=1e-9) == needed.flops + needed.bytes


@pytest.mark.parametrize(("experts", "batch"), [(4, 8), (32, 256), (5, 5)])
def test_uniform_routes_take_every_expert_equally_often(experts: int, batch: int) -> None:
    counts = torch.bincount(model_cases.uniform_routes(experts, batch), minlength=experts)
    assert counts.tolist() == [batch // experts] * experts


def test_routes_of_single_images_are_spread_over_the_experts() -> None:
    assert sorted(model_cases.uniform_routes(32, 1).tolist()) == [3, 7, 11, 15, 19, 23, 27, 31]
    assert model_cases.uniform_routes(1, 1).tolist() == [0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cases, "PRESET", "digits")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("experts", [1, 3])
def test_a_step_leaves_the_memory_as_full_as_it_was(experts: int) -> None:
    stream = model_cases.Stream("fused", experts)
    for _ in range(2):
        done = stream.step()
        assert done.loss > 0 and len(done.distances) == experts - 1 and len(done.gates) == experts
        assert len(stream.learner.memory) == (CFG.memory_size if experts == 1 else CFG.memory_size - 10)
        assert stream.learner.model.num_experts == experts


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("batch", [6, 1])
def test_inference_takes_the_forced_routes_and_computes_the_real_ones(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = model_cases.inference(experts=3, batch=batch)
    scored = []
    real = levit.reference.LEViT.elbo_loss
    monkeypatch.setattr(levit.reference.LEViT, "elbo_loss", lambda self, x: scored.append(len(x)) or real(self, x))
    logits = case.variants["reference"]()
    routes = model_cases.uniform_routes(3, batch)
    model = model_cases.build("reference", 3)
    images = torch.rand(len(routes), 1, 8, 8, generator=torch.Generator().manual_seed(4))
    assert sum(scored) == len(routes)
    for row, (image, k) in enumerate(zip(images, routes.tolist(), strict=True)):
        torch.testing.assert_close(logits[row], model.forward_expert(image[None], k)[0], rtol=1e-4, atol=1e-5)
    case.check(case.variants["fused"](), logits)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("key", "status"), [(None, "ok"), ("norm.running_mean", "check"), ("vae.mu.bias", "check")])
def test_a_step_with_one_wrong_frozen_expert_fails_its_check(
    key: str | None, status: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = model_cases.build

    def damaged(kind: str, experts: int, precision: str) -> torch.nn.Module:
        model = build(kind, experts, precision)
        if kind == "fused" and key:
            state = model.state_dict()
            state[f"experts.1.{key}"].zero_()
            model.load_state_dict(state)
        return model

    monkeypatch.setattr(model_cases, "build", damaged)
    reference, fused = run([model_cases.step(3, precision)], seconds=0.0, min_rounds=1)
    assert reference.status == "ok" and fused.status.startswith(status)


@pytest.mark.usefixtures("small")
def test_running_statistics_are_not_those_of_a_fresh_model() -> None:
    model = model_cases.build("fused", 2)
    means = [value for name, value in model.state_dict().items() if name.endswith("running_mean")]
    assert len(means) == 4 and all(value.abs().min() > 0 for value in means)


def test_a_backend_that_cannot_run_is_left_out_with_its_reason() -> None:
    def call() -> torch.Tensor:
        if forced_here() == "cpu":
            raise BackendError("no compiler was found")
        return torch.ones(3)

    case = op_cases._case("toy", "n=3", call, work.Work(flops=6, bytes=12))
    assert list(case.variants) == ["reference", "torch"] and case.absent == {"cpu": "no compiler was found"}


def test_a_backend_that_breaks_is_reported_not_left_out() -> None:
    def call() -> torch.Tensor:
        if forced_here() == "torch":
            raise ValueError("wrong shape")
        return torch.ones(3)

    rows = run([op_cases._case("toy", "n=3", call, work.Work())], seconds=0.0, min_rounds=1)
    assert {row.variant: row.status for row in rows}["torch"] == "check failed: ValueError: wrong shape"
