"""What a run refuses to start from, go on from, or write over; nothing on disk changes then."""

import json

import pytest
import torch
from run_helpers import Watcher, checkpoint, config, go, interrupt

from levit.runs import RunDirectory, RunError
from levit.train import Interrupted, RunOptions, build_stream


class TestRefusals:
    def test_a_finished_run_is_not_overwritten(self, finished):
        before = {p.name: p.read_bytes() for p in finished.iterdir() if p.name != ".lock"}
        with pytest.raises(RunError, match="holds a finished run; choose another --out"):
            go(finished)
        assert before == {p.name: p.read_bytes() for p in finished.iterdir() if p.name != ".lock"}

    def test_an_unfinished_run_wants_resume(self, tmp_path):
        with pytest.raises(Interrupted):
            go(tmp_path / "b", Watcher(20, interrupt()))
        with pytest.raises(RunError, match="unfinished run .--resume goes on with it"):
            go(tmp_path / "b")

    def test_a_folder_of_other_files_is_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(RunError, match="holds files but no run"):
            go(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (dict(cfg=config(learning_rate=0.1)), "config.learning_rate was 0.001 in this run, now 0.1"),
            (dict(cfg=config(seed=1)), "config.seed was 0"),
            (dict(method="reference"), "options.method was 'levit'"),
            (dict(limit=200), "options.limit was 300"),
        ],
        ids=["configuration", "seed", "method", "limit"],
    )
    def test_another_configuration_does_not_go_on(self, change, said, tmp_path):
        with pytest.raises(Interrupted):
            go(tmp_path / "b", Watcher(20, interrupt()))
        before = {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
        with pytest.raises(RunError, match=said):
            go(tmp_path / "b", resume=True, **change)
        assert before == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}

    def test_other_data_do_not_go_on(self, tmp_path):
        with pytest.raises(Interrupted):
            go(tmp_path / "b", Watcher(20, interrupt()))
        content = json.loads((tmp_path / "b" / "config.json").read_text())
        content["data"]["sha256"] = "0"
        (tmp_path / "b" / "config.json").write_text(json.dumps(content))
        with pytest.raises(RunError, match="data.sha256 was '0'"):
            go(tmp_path / "b", resume=True)

    @pytest.mark.parametrize("keep", [0, 100, 5000, -1], ids=["empty", "start", "half", "last byte"])
    def test_a_corrupt_checkpoint(self, keep, tmp_path):
        path = tmp_path / "b"
        with pytest.raises(Interrupted):
            go(path, Watcher(100, interrupt()))
        file = path / "checkpoint.pt"
        file.write_bytes(file.read_bytes()[:keep])
        before = {p.name: p.read_bytes() for p in path.iterdir()}
        with pytest.raises(RunError, match=r"checkpoint.pt: corrupt.*nothing was changed"):
            go(path, resume=True)
        assert before == {p.name: p.read_bytes() for p in path.iterdir()}

    def test_a_checkpoint_of_another_run(self, tmp_path):
        for name, cfg in (("b", config()), ("c", config(embed_dim=4))):
            with pytest.raises(Interrupted):
                go(tmp_path / name, Watcher(20, interrupt()), cfg=cfg)
        (tmp_path / "c" / "checkpoint.pt").replace(tmp_path / "b" / "checkpoint.pt")
        before = {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
        with pytest.raises(RunError, match="config differs from config.json"):
            go(tmp_path / "b", resume=True)
        assert before == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}

    def test_a_checkpoint_whose_state_does_not_fit(self, tmp_path):
        with pytest.raises(Interrupted):
            go(tmp_path / "b", Watcher(20, interrupt()))
        state = checkpoint(tmp_path / "b")
        del state["learner"]["memory"]
        torch.save(state, tmp_path / "b" / "checkpoint.pt")
        with pytest.raises(RunError, match="does not fit this model"):
            go(tmp_path / "b", resume=True)

    @pytest.mark.parametrize("name", ["config.json", "checkpoint.pt"])
    @pytest.mark.parametrize(("version", "age"), [(1, "an older"), (99, "a newer"), ("x", "another")])
    def test_another_version_of_the_files(self, name, version, age, tmp_path):
        path = tmp_path / "b"
        with pytest.raises(Interrupted):
            go(path, Watcher(20, interrupt()))
        if name == "config.json":
            content = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(content | {"format": version}))
        else:
            torch.save(checkpoint(path) | {"format": version}, path / name)
        with pytest.raises(
            RunError, match=f"{name}: format {version!r} of {age} version of levit; this one reads format 2"
        ):
            go(path, resume=True)

    def test_an_unreadable_config(self, tmp_path):
        (tmp_path / "config.json").write_text('{"format": 1')
        with pytest.raises(RunError, match="config.json: corrupt"):
            RunDirectory(tmp_path).read_config()

    def test_no_run_and_no_results(self, tmp_path):
        with pytest.raises(RunError, match="no run here"):
            RunDirectory(tmp_path).read_config()
        RunDirectory(tmp_path).write_config({})
        with pytest.raises(RunError, match="not finished yet"):
            RunDirectory(tmp_path).read_results()

    def test_a_stream_that_cannot_fill_the_memory(self):
        cfg = config(memory_size=2000)
        with pytest.raises(ValueError, match=r"memory_size: the stream has 300 images, .* 2000 .*--memory-size 60"):
            build_stream(cfg, RunOptions(limit=300))
        assert len(build_stream(cfg, RunOptions(limit=300, method="finetune"))) == 300
        assert len(build_stream(config(memory_size=2000, max_experts=1), RunOptions(limit=300))) == 300

    @pytest.mark.parametrize("field", ["eval_every", "log_every", "checkpoint_every"])
    def test_options_below_one(self, field):
        with pytest.raises(ValueError, match=f"{field}: expected at least 1, got 0"):
            RunOptions(**{field: 0})
        with pytest.raises(ValueError, match="method: expected one of levit, reference, finetune, slda, got 'magic'"):
            RunOptions(method="magic")

    def test_checkpoints_by_the_clock(self, tmp_path, monkeypatch):
        saved = []
        monkeypatch.setattr(RunDirectory, "save_checkpoint", lambda run, state: saved.append(state["progress"]))
        go(tmp_path / "a", limit=60, checkpoint_every=10**9, checkpoint_minutes=1e-9)
        assert [progress["position"] for progress in saved] == list(range(10, 61, 10))
        with pytest.raises(ValueError, match="checkpoint_minutes: expected more than 0, got 0"):
            RunOptions(checkpoint_minutes=0)

    def test_a_learner_that_fails_ends_the_run_and_keeps_the_checkpoint(self, tmp_path, monkeypatch):
        path = tmp_path / "b"
        with pytest.raises(Interrupted):
            go(path, Watcher(20, interrupt()))
        before = (path / "checkpoint.pt").read_bytes()

        def diverge(self, images, labels):
            raise RuntimeError("loss: expected a finite number, got nan")

        monkeypatch.setattr("levit.learner.Learner.observe", diverge)
        with pytest.raises(RunError, match="failed at image 20 .loss: expected a finite number"):
            go(path, resume=True)
        assert (path / "checkpoint.pt").read_bytes() == before
