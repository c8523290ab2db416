"""The prepared GPU run, as far as it can be held to its word without a GPU."""

import csv
import json
import time

import pytest
import torch
from torch.utils._pytree import tree_map

from bench import gpu, gpu_cases, gpu_models, gpu_sizes
from bench.gpu import Report, Step, carry_out

TINY = [
    ("expert_attention", lambda device, dtype: gpu_sizes._attention(3, 2, 5, device, dtype)),
    ("dkf_fuse", lambda device, dtype: gpu_sizes._fuse(3, 4, 6, device, dtype)),
    ("task_attention", lambda device, dtype: gpu_sizes._tasks(3, 2, device, dtype)),
    ("vae_training_loss", lambda device, dtype: gpu_sizes._vae_training(4, device, dtype)),
    ("head_training_loss", lambda device, dtype: gpu_sizes._head_training(4, device, dtype)),
]
CONSTANT = {"vae_training_loss": (0, 3)}


def test_dry_run_lists_every_step_without_a_gpu(capsys):
    assert gpu.main(["--dry-run", "--minutes", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 minutes") and len(lines) == 1 + len(gpu.steps())
    assert "environment" in lines[1] and "check expert_attention" in lines[2]
    for op in gpu_cases.REFERENCES:
        assert any(f"check {op} bfloat16" in x for x in lines) and any(f"time {op}" in x for x in lines)


def test_the_plan_fits_into_its_minutes():
    assert sum(step.seconds for step in gpu.steps()) <= 8 * 60


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "soon"])
def test_minutes_must_be_positive(minutes):
    with pytest.raises(SystemExit):
        gpu.main(["--dry-run", "--minutes", minutes])


def test_it_stays_inside_its_minutes_and_a_failure_does_not_end_it(tmp_path):
    now = [0.0]

    def takes(seconds, **row):
        def run(found, deadline):
            now[0] += seconds
            if not row:
                raise RuntimeError("no kernel\nimage")
            found.add("time", **row)

        return run

    plan = [
        Step("breaks", 10, takes(5)),
        Step("first", 10, takes(30, op="a", status="ok")),
        Step("too long", 40, takes(40, op="b", status="ok")),
        Step("short", 10, takes(10, op="c, d", status="ok")),
    ]
    found = Report("toy")
    carry_out(plan, found, deadline=60.0, folder=tmp_path, clock=lambda: now[0])
    assert now[0] == 45 and [row["op"] for row in found.rows] == ["a", "c, d"]
    assert found.notes == ["breaks: RuntimeError: no kernel image", "not run, no time was left: too long"]
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["rows"] == found.rows and document["device"] == "toy" and document["commit"]
    assert [row["op"] for row in csv.DictReader((tmp_path / "gpu.csv").read_text().splitlines())] == ["a", "c; d"]
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("# toy, 20") and "| c, d | ok |" in text and "- not run, no time was left: too long" in text


def test_shares_are_of_the_ceilings_of_this_run():
    found = Report("toy")
    assert found.shares("bfloat16", 10.0, 100.0) == {}
    found.add("ceiling", what="copy", gbs=400.0)
    found.add("ceiling", what="matmul bfloat16", tflops=40.0)
    assert found.shares("bfloat16", 10.0, 100.0) == {"%_of_matmul": 25.0, "%_of_copy": 25.0}
    assert found.shares("float32", 10.0, 100.0) == {"%_of_copy": 25.0}


@pytest.mark.parametrize("op, make", TINY)
def test_a_check_passes_what_is_right_and_fails_what_is_wrong(op, make, monkeypatch):
    case = gpu_cases.GpuCase(op, "tiny", make, 1, 1, CONSTANT.get(op, ()))
    share, plain = gpu_cases.worst_error(case, "cpu", torch.float32, "torch")
    assert share <= 1 and 0 < plain < 1e-5
    right = gpu_cases.on_backend
    monkeypatch.setattr(gpu_cases, "on_backend", lambda *args: tree_map(lambda x: x * 1.001, right(*args)))
    assert gpu_cases.worst_error(case, "cpu", torch.float32, "torch")[0] > 1


@pytest.mark.parametrize("op", gpu_cases.TRAINING)
def test_training_losses_are_timed_with_their_gradients(op):
    args = dict(TINY)[op]("cpu", torch.float32)
    case = gpu_cases.GpuCase(op, "tiny", None, 1, 1, CONSTANT.get(op, ()))
    weights = next(x for x in args if isinstance(x, list))
    for _, call in case.on_backends(["torch", "reference"], args):
        loss, *grads = call()
        assert loss.shape == () and [x.shape for x in grads[-len(weights) :]] == [x.shape for x in weights]


def test_a_step_is_timed_against_the_reference(monkeypatch):
    monkeypatch.setattr(gpu_models, "EXPERTS", 2)
    found = Report("toy")
    gpu_models.step(found, time.monotonic() + 60, device="cpu", repeats=1)
    assert [row["model"] for row in found.rows] == ["reference", "fused"]
    assert all(row["median_ms"] > 0 and row["over_reference"] > 0 for row in found.rows)


@pytest.mark.parametrize("gated", [True, False])
def test_the_sdpa_rival_computes_the_same(gated):
    args = list(TINY[0][1]("cpu", torch.float64))
    args[5] = args[5].double() if gated else None
    want = gpu_cases.REFERENCES["expert_attention"](*args)
    torch.testing.assert_close(gpu_cases.attention_by_sdpa(*args), want)


def test_arguments_of_every_case_are_taken_by_the_ops():
    for case in gpu_sizes.cases(experts=2, batch=2):
        args = case.make("cpu", torch.float32)
        assert case.flops > 0 and case.numbers > 0
        assert gpu_cases.registry.backends()["torch"].can_run(case.op, args)
