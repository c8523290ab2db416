"""The competitor under torch.compile: the same answers, nothing compiled twice, and only where it is asked for."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from bench import compile_cases, model_cases
from bench.__main__ import main
from bench.cases import CASES, SLOW, select
from bench.harness import Case, run


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(model_cases, "PRESET", "digits")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))


def graphs_after_the_check(case: Case) -> int:
    """Checks and times the case with two threads asked for; how many graphs were compiled after its first call."""
    seen = []
    compiled = case.variants["compile"]

    def watched() -> object:
        output = compiled()
        seen.append(counters["stats"]["unique_graphs"])
        return output

    case = case.__class__(**{**vars(case), "variants": {**case.variants, "compile": watched}})
    rows = run([case], threads=(1, 2), seconds=0.0, min_rounds=2)
    assert [(row.variant, row.threads, row.status) for row in rows] == [
        (name, 1, "ok") for name in ("reference", "fused", "compile")
    ]
    assert all(row.first > 0 for row in rows)
    return seen[-1] - seen[0]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("together", [1, 3])
def test_compiled_inference(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compile_cases.TOGETHER, 3, together)
    before = counters["stats"]["unique_graphs"]
    assert graphs_after_the_check(compile_cases.inference(3, 6)) == 0
    assert counters["stats"]["unique_graphs"] - before == 2 * 3 // together + 3


@pytest.mark.usefixtures("small")
def test_compiled_step() -> None:
    assert graphs_after_the_check(compile_cases.step(3)) == 0


@pytest.mark.usefixtures("small")
def test_a_wrong_competitor_is_not_timed() -> None:
    case = compile_cases.inference(2, 4)
    case.check(case.variants["fused"](), case.variants["compile"]())
    with pytest.raises(AssertionError):
        case.check(case.variants["fused"](), 2 * case.variants["compile"]())


def test_slow_cases_are_left_out_unless_named() -> None:
    assert not set(SLOW) & set(select())
    assert list(select(["step K=8"])) == ["step K=8"]
    assert list(select(["COMPILED inference"])) == ["compiled inference K=8 B=256", "compiled inference K=32 B=256"]
    assert not set(CASES) & set(SLOW)


def test_the_command_line_knows_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "compiled step K=8" in capsys.readouterr().err
