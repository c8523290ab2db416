"""One writer at a time, and a full disk: nothing is lost or half written."""

import errno
import multiprocessing
import os

import pytest
from run_helpers import Watcher, go, interrupt

from levit.runs import COLUMNS, MetricsLog, RunDirectory, RunError, new_run_path, write_atomically
from levit.train import Interrupted


def hold(path, ready, release):
    with RunDirectory(path).lock():
        ready.set()
        release.wait(30)


class TestLock:
    def test_one_writer_at_a_time_and_the_dead_hold_nothing(self, tmp_path):
        context = multiprocessing.get_context("fork")
        ready, release = context.Event(), context.Event()
        holder = context.Process(target=hold, args=(tmp_path / "a", ready, release))
        holder.start()
        try:
            assert ready.wait(30)
            with pytest.raises(RunError, match=f"process {holder.pid} is writing this run"):
                go(tmp_path / "a")
            assert [p.name for p in (tmp_path / "a").iterdir()] == [".lock"]
        finally:
            holder.kill()
            holder.join()
        with RunDirectory(tmp_path / "a").lock():
            assert (tmp_path / "a" / ".lock").read_text() == f"{os.getpid()}\n"

    def test_released_after_use(self, tmp_path):
        run = RunDirectory(tmp_path / "a")
        for _ in range(2):
            with run.lock():
                pass


class Full:
    """A file on a disk that is full after `room` bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


class TestFullDisk:
    @pytest.mark.parametrize("room", [0, 500, 20000])
    def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_one(self, room, tmp_path, monkeypatch):
        path = tmp_path / "b"
        with pytest.raises(Interrupted):
            go(path, Watcher(20, interrupt()))
        before = (path / "checkpoint.pt").read_bytes()
        assert len(before) > 20000
        with monkeypatch.context() as patch:
            real = open
            full = lambda name, mode="r", **k: (  # noqa: E731
                Full(real(name, mode, **k), room) if str(name).endswith("checkpoint.pt.part") else real(name, mode, **k)
            )
            patch.setattr("levit.runs.open", full, raising=False)
            with pytest.raises(RunError, match=r"checkpoint.pt: cannot be written .*earlier results are kept"):
                go(path, resume=True)
        assert (path / "checkpoint.pt").read_bytes() == before
        assert not list(path.glob("*.part"))
        go(path, resume=True)

    def test_metrics(self, tmp_path, monkeypatch):
        run = RunDirectory(tmp_path)
        log = MetricsLog(run, 0)
        row = dict.fromkeys(COLUMNS) | {"samples": 10}
        log.append(row)
        monkeypatch.setattr(log, "_file", Full(log._file, 5))
        with pytest.raises(RunError, match=r"metrics.csv: cannot be written \(No space left on device\)"):
            log.append(row)
        log.close()
        assert [row["samples"] for row in run.read_metrics()] == [10]

    def test_json(self, tmp_path, monkeypatch):
        run = RunDirectory(tmp_path)
        run.write_config({"a": 1})
        monkeypatch.setattr("levit.runs.os.fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))
        with pytest.raises(RunError, match="config.json: cannot be written"):
            run.write_config({"a": 2})
        assert run.read_config()["a"] == 1 and [p.name for p in tmp_path.iterdir()] == ["config.json"]

    def test_a_bug_in_the_writer_is_not_hidden(self, tmp_path):
        with pytest.raises(ZeroDivisionError):
            write_atomically(tmp_path / "x", lambda file: 1 / 0)
        assert not list(tmp_path.iterdir())

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError, match="cannot be created"), RunDirectory(tmp_path / "file" / "run").lock():
            pass
        with pytest.raises(RunError, match="cannot be created"):
            new_run_path(tmp_path / "file" / "run")
