"""Tuning: off it costs and touches nothing, on it asks once per bucket and machine, and it never chooses what fails."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from levit_kernels.triton import tuning
from levit_kernels.triton.expert_attention import tile_for, tiles_for

GPU = torch.device("cuda", 0)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """A GPU on which candidates take as long as their value says; the list collects what was timed."""
    seen = []

    def seconds(run, candidate):
        seen.append(candidate)
        return candidate

    monkeypatch.setenv(tuning.ENVIRONMENT, "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy GPU/3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_seconds", seconds)
    monkeypatch.setattr(tuning, "_tables", {})
    return seen


def test_off_the_default_is_taken_and_nothing_touched(timed, monkeypatch, tmp_path):
    monkeypatch.delenv(tuning.ENVIRONMENT)
    assert tuning.choose("op", (1,), [3, 1], None, GPU) == 3
    monkeypatch.setenv(tuning.ENVIRONMENT, "1")
    assert tuning.choose("op", (1,), [3, 1], None, torch.device("cpu")) == 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.choose("op", (1,), [3, 1], None, GPU) == 3
    assert not timed and not list(tmp_path.iterdir())


def test_the_fastest_is_found_once_and_remembered_by_other_processes(timed, monkeypatch):
    assert tuning.choose("op", (1,), [3, 1, 2], None, GPU) == 1
    assert tuning.choose("op", (1,), [3, 1, 2], None, GPU) == 1 and timed == [3, 1, 2]
    monkeypatch.setattr(tuning, "_tables", {})  # another process
    assert tuning.choose("op", (1,), [3, 1, 2], None, GPU) == 1 and timed == [3, 1, 2]
    assert tuning.choose("op", (2,), [3, 1, 2], None, GPU) == 1 and len(timed) == 6
    assert tuning.choose("op", (1,), [5, 4], None, GPU) == 4  # a version with other candidates


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"op (1,)": "nonsense"}'])
def test_a_spoiled_file_is_replaced(text, timed):
    path = tuning._path(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert tuning.choose("op", (1,), [3, 1], None, GPU) == 1
    assert json.loads(path.read_text()) == {"op (1,)": "1"} and path.name.startswith("Toy-GPU-3-triton-")


def test_a_read_only_home_is_no_failure(timed, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(PermissionError))
    assert tuning.choose("op", (1,), [3, 1], None, GPU) == 1


def test_candidates_are_few_and_the_default_comes_first():
    for dtype in (torch.float32, torch.bfloat16):
        for length in (1, 5, 16, 49, 64):
            patches = torch.empty(8, length, 49, dtype=dtype, device="meta")
            found = tiles_for(patches, torch.empty(4, 100, 3, 3, 100, device="meta"))
            assert found[0] == tile_for(patches, torch.empty(4, 100, 3, 3, 100, device="meta")) and len(found) <= 4
            assert all(tile.IMAGES >= 1 and tile.IMAGES * length <= tile.ROWS for tile in found)
