"""Stopping a run leaves no trace, however it was stopped."""

import signal

import pytest
from run_helpers import Watcher, checkpoint, config, equal, go, interrupt, metrics

from levit.runs import RunDirectory
from levit.train import Interrupted


class TestResume:
    @pytest.mark.parametrize("method", ["levit", "reference", "finetune", "slda"])
    def test_stopping_leaves_no_trace(self, method, tmp_path):
        """Stopped before the first expansion, right at it, and after it; then run to the end."""
        cfg = config(seed=4)
        whole = go(tmp_path / "a", cfg=cfg, method=method)
        stops = [10, 60, 190]
        if method in ("levit", "reference"):
            assert whole["expansions"][0] == 60 and stops[1] < whole["expansions"][1] < 300
        for number, stop in enumerate(stops):
            with pytest.raises(Interrupted, match=f"saved at image {stop} of 300"):
                go(tmp_path / "b", Watcher(stop, interrupt()), resume=number > 0, cfg=cfg, method=method)
            assert not (tmp_path / "b" / "results.json").exists()
        resumed = go(tmp_path / "b", resume=True, cfg=cfg, method=method)
        assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
        assert equal(checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b"))
        assert equal(whole, resumed)

    def test_a_process_that_was_killed_goes_on_from_its_latest_checkpoint(self, finished, tmp_path):
        path = tmp_path / "b"

        def die():
            raise SystemExit

        with pytest.raises(SystemExit):
            go(path, Watcher(250, die))
        with open(path / "metrics.csv", "a") as file:
            file.write("260,1.5,")  # half a line
        watcher = Watcher()
        go(path, watcher, resume=True)
        assert watcher.positions[0] == 210
        assert metrics(path) == metrics(finished)

    def test_killed_before_the_first_checkpoint(self, finished, tmp_path):
        path = tmp_path / "b"

        def die():
            raise SystemExit

        with pytest.raises(SystemExit):
            go(path, Watcher(50, die))
        go(path, resume=True)
        assert metrics(path) == metrics(finished)

    def test_killed_between_the_last_checkpoint_and_the_results(self, finished, tmp_path, monkeypatch):
        path = tmp_path / "b"
        monkeypatch.setattr(RunDirectory, "write_results", lambda self, results: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go(path)
        monkeypatch.undo()
        results = go(path, resume=True)
        assert equal({"format": 2} | results, RunDirectory(finished).read_results())
        assert metrics(path) == metrics(finished)

    def test_a_finished_run_is_only_read(self, finished):
        watcher = Watcher()
        before = (finished / "results.json").stat().st_mtime_ns
        assert go(finished, watcher, resume=True) == RunDirectory(finished).read_results()
        assert not watcher.positions and (finished / "results.json").stat().st_mtime_ns == before

    def test_sigterm_saves_too_and_handlers_are_put_back(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        watcher = Watcher(20, interrupt(signal.SIGTERM))
        with pytest.raises(Interrupted):
            go(tmp_path / "b", watcher)
        assert checkpoint(tmp_path / "b")["progress"]["position"] == 20
        assert "second Ctrl-C" in watcher.texts[0]
        assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))

    def test_a_second_interrupt_stops_at_once(self, tmp_path):
        def twice():
            interrupt()()
            interrupt()()

        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "b", Watcher(20, twice))
        assert not (tmp_path / "b" / "checkpoint.pt").exists()
