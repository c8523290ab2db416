"""Who computes: the automatic choice with its reasons, the forced one with its exact error, the fallback told once."""

import asyncio
import contextvars
import logging
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from op_cases import NATIVE_OPS, OPS, to_dtype

import levit_kernels
from levit_kernels import BackendError, info, native, use_backend
from levit_kernels.backends import cpu, registry
from levit_kernels.backends.registry import Backend, choose

NATIVE, WHY_NOT = native.available()
SAMPLES = info.sample_arguments("cpu", torch.float32)


def pick(op, dtype=torch.float32):
    return choose(op, info.sample_arguments("cpu", dtype)[op]).name


def why_not_cuda(op):
    return registry.backends()["cuda"].reason_against(op, SAMPLES[op])


def test_the_order_is_cuda_triton_cpu_torch_reference():
    assert tuple(registry.backends()) == ("cuda", "triton", "cpu", "torch", "reference")


def test_automatic_choice():
    assert {op: pick(op) for op in SAMPLES} == {
        "expert_attention": "cpu" if NATIVE else "torch",
        "dkf_fuse": "cpu" if NATIVE else "torch",
        "latent_distance": "cpu" if NATIVE else "torch",
        "expansion_distances": "torch",
        "elbo_loss": "cpu" if NATIVE else "torch",
        "vae_codes": "cpu" if NATIVE else "torch",
        "vae_training_loss": "cpu" if NATIVE else "torch",
        "strided_conv": "cpu" if NATIVE else "torch",
        "transposed_conv": "cpu" if NATIVE else "torch",
        "head_training_loss": "cpu" if NATIVE else "torch",
        "expert_training_loss": "cpu" if NATIVE else "torch",
        "batch_norm_fold": "torch",
        "position_noise": "cpu" if NATIVE else "torch",
        "task_attention": "cpu" if NATIVE else "torch",
    }
    assert pick("latent_distance", torch.bfloat16) == "torch"
    halves = {op: pick(op, torch.float16) for op in SAMPLES}
    assert halves.pop("position_noise") == (
        "cpu" if NATIVE else "torch"
    )  # it is made in float64, whatever is asked for
    assert set(halves.values()) == {"reference"}


@pytest.mark.parametrize("op", OPS)
def test_the_choice_and_its_reasons_are_logged(op, caplog):
    with caplog.at_level(logging.DEBUG, logger="levit_kernels"):
        OPS[op].function(*SAMPLES[op])
    (line,) = [r.getMessage() for r in caplog.records if r.name == "levit_kernels"]
    assert line.startswith(f"{op}: {pick(op)} (cuda: {why_not_cuda(op)}; triton:")
    if op not in NATIVE_OPS:
        assert f"cpu: has no kernel for {op}" in line


@pytest.mark.parametrize("op", OPS)
def test_forcing_a_backend_that_is_not_built(op):
    with use_backend("cuda"), pytest.raises(BackendError) as caught:
        OPS[op].function(*SAMPLES[op])
    assert str(caught.value) == (f"levit_kernels.{op}: backend 'cuda' was forced but cannot run: {why_not_cuda(op)}")


def test_can_run_serves_both_choices():
    backend, args = registry.backends()["torch"], info.sample_arguments("cpu", torch.float16)["elbo_loss"]
    assert not backend.can_run("elbo_loss", args)
    with pytest.raises(BackendError, match="backend 'torch' was forced but cannot run: float16 on a CPU"):
        backend.can_run("elbo_loss", args, raise_error=True)
    assert backend.can_run("elbo_loss", SAMPLES["elbo_loss"], raise_error=True)


def test_forcing_the_native_backend():
    with use_backend("cpu"):
        if NATIVE:
            levit_kernels.latent_distance(*SAMPLES["latent_distance"])
        else:
            with pytest.raises(BackendError, match="has no native kernels|do not load"):
                levit_kernels.latent_distance(*SAMPLES["latent_distance"])
        with pytest.raises(BackendError, match="has no kernel for expansion_distances"):
            levit_kernels.expansion_distances(*SAMPLES["expansion_distances"])
        with pytest.raises(BackendError, match="takes float32 and float64, got torch.bfloat16" if NATIVE else "native"):
            levit_kernels.latent_distance(*to_dtype(SAMPLES["latent_distance"], torch.bfloat16))


def test_unknown_names():
    with pytest.raises(ValueError, match="use_backend: name must be one of cuda, triton, .*, got 'gpu'"):
        with use_backend("gpu"):
            pass


def test_the_environment_forces_and_use_backend_goes_before_it(monkeypatch):
    monkeypatch.setenv("LEVIT_KERNELS_BACKEND", "reference")
    assert pick("expansion_distances") == "reference"
    with use_backend("torch"):
        assert pick("expansion_distances") == "torch"
    monkeypatch.setenv("LEVIT_KERNELS_BACKEND", "triton")
    with pytest.raises(BackendError, match="triton"):
        levit_kernels.expansion_distances(*SAMPLES["expansion_distances"])
    monkeypatch.setenv("LEVIT_KERNELS_BACKEND", "fast")
    with pytest.raises(ValueError, match="LEVIT_KERNELS_BACKEND must be one of .*, got 'fast'"):
        levit_kernels.expansion_distances(*SAMPLES["expansion_distances"])
    monkeypatch.setenv("LEVIT_KERNELS_BACKEND", "")
    assert pick("expansion_distances") == "torch"


def test_forcing_nests_and_ends_with_an_exception():
    with use_backend("reference"):
        with use_backend("torch"):
            assert pick("expansion_distances") == "torch"
        assert pick("expansion_distances") == "reference"
        with pytest.raises(KeyError), use_backend("torch"):
            raise KeyError
        assert pick("expansion_distances") == "reference"
        with use_backend(None):
            assert pick("expansion_distances") == "torch"
    assert pick("expansion_distances") == "torch"


def test_forcing_is_local_to_thread_and_task():
    seen = {}

    def work(name):
        seen[name] = pick("expansion_distances")

    async def task(name, gate):
        with use_backend(name):
            await gate.wait()
            seen[name] = pick("expansion_distances")

    async def tasks():
        gate = asyncio.Event()
        running = [asyncio.create_task(task(name, gate)) for name in ("reference", "torch")]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*running)

    with use_backend("reference"):
        thread = threading.Thread(target=work, args=("thread",))
        thread.start()
        thread.join()
        contextvars.copy_context().run(work, "copy")
    asyncio.run(tasks())
    assert seen == {"thread": "torch", "copy": "reference", "reference": "reference", "torch": "torch"}


def test_a_backward_pass_keeps_the_force_of_its_forward(caplog):
    codes, query = (x.clone().requires_grad_() for x in SAMPLES["latent_distance"])
    with use_backend("reference"):
        out = levit_kernels.latent_distance(codes, query)
    calls = []
    table = registry.backends()
    original = table["reference"]
    ops = {
        **original.ops,
        "latent_distance_backward": lambda *a: calls.append(1) or original.ops["latent_distance_backward"](*a),
    }
    table["reference"] = Backend("reference", ops, original.refuse)
    try:
        out.sum().backward()
    finally:
        table["reference"] = original
    assert calls == [1]


def test_the_fallback_from_a_library_that_did_not_build_is_told_once(monkeypatch):
    broken = Backend("cpu", cpu.OPS, cpu.refuse, lambda: "no compiler was found")
    monkeypatch.setitem(registry.backends(), "cpu", broken)
    monkeypatch.setattr(registry, "_told", set())
    with pytest.warns(UserWarning, match="'cpu' backend would run latent_distance faster .*: no compiler was found"):
        assert pick("latent_distance") == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick("latent_distance") == "torch"
        assert pick("dkf_fuse") == "torch"
    with use_backend("cpu"), pytest.raises(BackendError, match="no compiler was found"):
        levit_kernels.latent_distance(*SAMPLES["latent_distance"])


def test_importing_stays_off_cuda_and_builds_nothing():
    code = """
import levit_kernels, torch
from levit_kernels import native
assert not torch.cuda.is_initialized() and not native._loaded
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def test_info_says_who_takes_each_op_and_why(capsys, monkeypatch):
    info.main()
    told = capsys.readouterr().out
    assert f"levit_kernels {levit_kernels.__version__}" in told and f"torch {torch.__version__}" in told
    table = told.split("ops on cpu, float32\n")[1].split("ops on")[0]
    for op in OPS:
        assert f"  {op}: {pick(op)}\n" in table
    for op in OPS:
        assert f"cuda      {why_not_cuda(op)}\n" in table
    assert "float16 on a CPU is left to the reference" in told
    assert ("takes it" if NATIVE else WHY_NOT) in table.split("latent_distance:")[1].split("\n    torch ")[0]
    monkeypatch.setenv("LEVIT_KERNELS_BACKEND", "cuda")
    info.main()
    assert "dkf_fuse: none (levit_kernels.dkf_fuse: backend 'cuda' was forced but cannot run" in capsys.readouterr().out


def test_accelerate_asks_the_model_and_keeps_it():
    class Model:
        fast = False

        def __accelerate__(self):
            self.fast = True

    model = Model()
    assert levit_kernels.accelerate(model) is model and model.fast
    with pytest.raises(
        TypeError, match=r"accelerate: model must have a method __accelerate__\(\), .*; Linear has none"
    ):
        levit_kernels.accelerate(torch.nn.Linear(2, 2))
