"""Run directories: what they record, that stopping leaves no trace, and that nothing is ever lost or half written."""

import csv
import errno
import json
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from levit.config import LEViTConfig
from levit.inference import load_model
from levit.learner import Event
from levit.progress import Progress
from levit.runs import COLUMNS, MetricsLog, RunDirectory, RunError, latest_run_path, new_run_path, write_atomically
from levit.streams import load_dataset
from levit.train import Interrupted, RunOptions, build_stream, train

SMALL = dict(
    embed_dim=8, num_heads=2, head_hidden=(8,), vae_hidden=(8, 8), latent_dim=4, memory_size=60, train_batch=16
)
TIMINGS = {"seconds", "samples_per_second", "evaluation_seconds", "seconds_per_thousand_images", "peak_memory_mib"}


class Watcher:
    """A display that records, and that calls `action` when the stream has come to image `at`."""

    def __init__(self, at=None, action=None):
        self.at, self.action = at, action
        self.positions, self.evaluations, self.texts = [], [], []

    def batch(self, progress, event, experts):
        self.positions.append(progress.position)
        if progress.position == self.at:
            self.action()

    def evaluated(self, progress, experience, experts):
        self.evaluations.append((progress.position, experience))

    def say(self, text):
        self.texts.append(text)


def config(**overrides):
    return LEViTConfig.preset("digits", **(SMALL | overrides))


def go(path, watcher=None, resume=False, cfg=None, **options):
    cfg = cfg or config()
    options = RunOptions(**({"limit": 300, "log_every": 20, "checkpoint_every": 100} | options))
    stream = build_stream(cfg, options)
    watcher = watcher or Watcher()
    return train(RunDirectory(path), cfg, options, stream, watcher, preset="digits", command="test", resume=resume)


def interrupt(number=signal.SIGINT):
    return lambda: os.kill(os.getpid(), number)


def metrics(path, without=("seconds", "samples_per_second")):
    with open(path / "metrics.csv", newline="") as file:
        rows = list(csv.reader(file))
    keep = [i for i, name in enumerate(rows[0]) if name not in without]
    return [[row[i] for i in keep] for row in rows]


def checkpoint(path):
    return torch.load(path / "checkpoint.pt", weights_only=True)


def equal(a, b):
    """Bit-equal, all the way down, but for timings."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a if key not in TIMINGS | {"row_seconds"})
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, for tests that only look."""
    path = tmp_path_factory.mktemp("runs") / "a"
    go(path)
    return path


class TestContent:
    def test_files(self, finished):
        assert {p.name for p in finished.iterdir()} == {
            ".lock",
            "config.json",
            "stream.npz",
            "metrics.csv",
            "results.json",
            "checkpoint.pt",
        }

    def test_config(self, finished):
        content = json.loads((finished / "config.json").read_text())
        assert LEViTConfig(**content["config"]) == config()
        assert content["options"]["limit"] == 300 and content["command"] == "test" and content["preset"] == "digits"
        assert content["data"]["sha256"] == load_dataset("digits").sha256
        assert content["stream"]["class_order"] == list(range(10)) and content["stream"]["ends"][-1] == 300
        assert content["stream"]["scenario"] == "split" and content["stream"]["experiences"][4] == [8, 9]
        assert content["stream"]["classes"][3] == {"label": 3, "data_set": "digits", "original_label": "3"}
        assert content["versions"]["torch"] == torch.__version__ and "commit" in content

    def test_what_came_when(self, finished):
        """The order is explicit: the recorded rows give the recorded labels, and the stream can be built from them."""
        data = load_dataset("digits")
        with np.load(finished / "stream.npz") as record:
            index, label, experience = record["index"], record["label"], record["experience"]
            assert (record["class_data_set"] == "digits").all()
            assert record["class_original_label"].tolist() == [str(i) for i in range(10)]
        assert (data.train_labels[index] == label).all() and (experience == label // 2).all()
        assert len(set(index.tolist())) == 300

    def test_metrics(self, finished):
        rows = RunDirectory(finished).read_metrics()
        results = json.loads((finished / "results.json").read_text())
        positions = [row["samples"] for row in rows]
        assert positions == sorted(set(positions)) and positions[-1] == 300
        assert set(range(20, 301, 20)) <= set(positions)
        assert set(results["expansions"]) <= set(positions)
        experts = {row["samples"]: row["experts"] for row in rows}
        assert [experts[at] for at in results["expansions"]] == list(range(2, results["num_experts"] + 1))
        checks = [row for row in rows if row["min_distance"] is not None]
        assert checks and all(row["threshold"] == pytest.approx(config().expansion_threshold, 1e-5) for row in checks)
        ends = json.loads((finished / "config.json").read_text())["stream"]["ends"]
        completing = [-(-end // 10) * 10 for end in ends]  # the batch of 10 with the experience's last image
        assert [row["samples"] for row in rows if row["accuracy"] is not None] == completing
        assert rows[-1]["accuracy"] == pytest.approx(results["final_accuracy"], 1e-5)
        assert rows[-1]["seconds"] == pytest.approx(results["seconds"], 1e-4)

    def test_results(self, finished):
        results = json.loads((finished / "results.json").read_text())
        data = load_dataset("digits")
        sizes = [((data.test_labels // 2) == j).sum() for j in range(5)]
        last = results["accuracy_matrix"][-1]
        final = sum(size * value for size, value in zip(sizes, last, strict=True)) / sum(sizes)
        assert results["final_accuracy"] == pytest.approx(final)
        assert results["average_accuracy"] == pytest.approx(sum(last) / 5)
        assert results["num_experts"] == len(results["expansions"]) + 1 > 2
        assert results["images"] == 300 and results["seed"] == 0 and results["method"] == "levit"
        # 60 images of memory, of which 16 are needed for an update: the first batch of each filling does not update.
        fillings = 1 + len(results["expansions"])
        assert results["updates_per_sample"] == pytest.approx(3 * (30 - fillings) / 300)
        assert results["parameters"] > 0 and results["peak_memory_mib"] > 100
        assert results["samples_per_second"] == pytest.approx(300 / results["seconds"])
        assert results["peak_device_memory_mib"] is None and results["test_images"] == len(data.test_labels)
        assert results["seconds_per_thousand_images"] == pytest.approx(results["seconds"] / 0.3)

    def test_route_accuracy(self, finished):
        """Recounted from the record: which classes came between the positions at which experts were added."""
        results = json.loads((finished / "results.json").read_text())
        with np.load(finished / "stream.npz") as record:
            label = record["label"]
        borders = [0, *results["expansions"], 300]
        seen = [set(label[a:b].tolist()) for a, b in zip(borders, borders[1:], strict=False)]
        assert [sum(counts) for counts in results["seen"]] == [b for b in np.diff(borders) if b]
        data = load_dataset("digits")
        chosen = load_model(RunDirectory(finished)).route(data.to_float(data.test_images)).tolist()
        right = [known in seen[expert] for known, expert in zip(data.test_labels.tolist(), chosen, strict=True)]
        assert results["route_accuracy"] == pytest.approx(np.mean(right))

    def test_one_expert_has_nothing_to_route(self, tmp_path):
        results = go(tmp_path / "a", cfg=config(max_experts=1), limit=100, eval_every=5)
        assert results["route_accuracy"] is None and results["num_experts"] == 1

    def test_fewer_test_images(self, tmp_path):
        results = go(tmp_path / "a", method="finetune", limit=100, eval_every=5, test_limit=20)
        assert results["test_images"] == 20
        assert all((20 * value / 5) % 1 == pytest.approx(0) for value in results["accuracy_matrix"][-1])

    def test_evaluations_come_with_the_batch_that_ends_an_experience(self, tmp_path):
        watcher = Watcher()
        results = go(tmp_path / "a", watcher, eval_every=2)
        ends = json.loads((tmp_path / "a" / "config.json").read_text())["stream"]["ends"]
        assert watcher.evaluations == [(-(-ends[i] // 10) * 10, i) for i in (1, 3, 4)]
        assert [row is None for row in results["accuracy_matrix"]] == [True, False, True, False, False]

    def test_two_runs_of_one_seed_are_equal(self, finished, tmp_path):
        go(tmp_path / "b")
        assert equal(checkpoint(finished)["learner"], checkpoint(tmp_path / "b")["learner"])
        assert metrics(finished) == metrics(tmp_path / "b")

    def test_another_seed_is_another_run(self, finished, tmp_path):
        go(tmp_path / "b", cfg=config(seed=1))
        assert metrics(finished) != metrics(tmp_path / "b")


class TestProgress:
    def test_a_row_counts_from_the_row_before(self):
        progress = Progress(accuracy=0.5)
        progress.seconds = 2.0
        for loss, distances in ((None, None), (4.0, torch.tensor([3.0, 2.0])), (6.0, None)):
            progress.count(Event(False, distances, loss), 10, updates_per_batch=3)
        assert progress.row(2, 2.5, evaluated=False) == {
            "samples": 30,
            "loss": 5.0,
            "experts": 2,
            "min_distance": 2.0,
            "threshold": 2.5,
            "seconds": 2.0,
            "samples_per_second": 15.0,
            "accuracy": None,
        }
        progress.seconds = 3.0
        progress.count(Event(True, None, 1.0), 10, updates_per_batch=3)
        assert progress.row(3, 2.5, evaluated=True) == {
            "samples": 40,
            "loss": 1.0,
            "experts": 3,
            "min_distance": None,
            "threshold": None,
            "seconds": 3.0,
            "samples_per_second": 10.0,
            "accuracy": 0.5,
        }
        assert progress.updates == 9 and progress.expansions == [40]

    def test_a_multiple_is_crossed_once(self):
        progress = Progress()
        crossed = []
        for images in (7, 7, 7, 7, 2):
            progress.count(Event(False, None, None), images, 1)
            crossed.append(progress.crossed(10, images))
        assert crossed == [False, True, True, False, True]  # at 7, 14, 21, 28, 30
        assert progress.row(1, 1.0, False)["loss"] is None


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


class TestPaths:
    def test_new_paths_are_counted(self, tmp_path):
        stem = tmp_path / "runs" / "digits-levit-seed0"
        assert [new_run_path(stem).name for _ in range(3)] == [stem.name, stem.name + "-2", stem.name + "-3"]

    def test_the_latest_is_the_last_that_holds_a_run(self, tmp_path):
        stem = tmp_path / "a"
        with pytest.raises(RunError, match="no run to resume here"):
            latest_run_path(stem)
        for path in [new_run_path(stem) for _ in range(3)][:2]:
            RunDirectory(path).write_config({})
        assert latest_run_path(stem).name == "a-2"
