"""`levit train dytox-…`: the stream, the run directory, resuming, and what the other commands make of such a run."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from stream_helpers import dataset, keras_arrays, write_npz

from levit import cli
from levit.dytox.arguments import parse_dytox
from levit.dytox.config import PRESETS, DyToxConfig
from levit.dytox.run import TaskOptions, build_training
from levit.dytox.stream import task_stream
from levit.inference import load_model
from levit.runs import RunDirectory
from levit.streams import scenarios
from levit.train import Interrupted, train

SMALL = (
    "--image-size 8 --patch-size 4 --embed-dim 8 --num-heads 2 --depth 1 --num-classes 4 --epochs 2 --warmup-epochs 0 "
    "--finetune-epochs 1 --batch-size 8 --memory-size 12 --threads 1"
).split()
TIMINGS = {"seconds", "samples_per_second", "evaluation_seconds", "seconds_per_thousand_images", "peak_memory_mib"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a data set under the name of CIFAR-10: 4 classes, 10 training images each."""
    folder = tmp_path_factory.mktemp("data")
    write_npz(folder, "cifar10", **keras_arrays(size=8, classes=4, train=10, test=3, colours=3))
    return folder


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    threads, path = torch.get_num_threads(), tmp_path_factory.mktemp("runs") / "a"
    assert cli.main(["train", "dytox-cifar10", *SMALL, "--data-dir", str(data), "--out", str(path), "--quiet"]) == 0
    torch.set_num_threads(threads)
    return path


class Watcher:
    """A display that interrupts the run at the update of this number."""

    def __init__(self, at=None):
        self.left, self.evaluations = at, []

    def batch(self, progress, event, experts):
        if self.left is not None and progress.updates == self.left:
            os.kill(os.getpid(), signal.SIGINT)

    def evaluated(self, progress, experience, experts):
        self.evaluations.append((progress.position, experience, experts))

    def say(self, text):
        pass


def go(path, data, watcher=None, resume=False, **options):
    cfg = parse_dytox("dytox-cifar10", SMALL).config
    options = TaskOptions(**options)
    from levit.streams import configured_dataset

    stream = task_stream(cfg, configured_dataset(cfg, data), options.limit, options.test_limit)
    return train(
        RunDirectory(path),
        cfg,
        options,
        stream,
        watcher or Watcher(),
        preset="dytox-cifar10",
        resume=resume,
        build=build_training,
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in TIMINGS | {"row_seconds"})
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class TestStream:
    def test_a_first_group_and_equal_ones_after_it(self):
        data = dataset(train=(5,) * 7, test=(2,) * 7)
        plan = scenarios.class_incremental(data, np.random.RandomState(0), 3, 2)
        assert plan.experiences == [(0, 1, 2), (3, 4), (5, 6)] and plan.ends == [15, 25, 35]
        assert sorted(plan.rows.tolist()) == list(range(35))
        for row, experience in zip(plan.rows, plan.experience, strict=True):
            assert data.train_labels[row] in plan.experiences[experience]
        assert plan.test_experience.tolist() == [(0, 0, 0, 1, 1, 2, 2)[c] for c in data.test_labels]

    @pytest.mark.parametrize(("first", "later"), [(3, 3), (8, 1)])
    def test_groups_that_do_not_divide_the_classes(self, first, later):
        data = dataset(train=(5,) * 7, test=(2,) * 7)
        with pytest.raises(ValueError, match="classes_per_task: expected a divisor of"):
            scenarios.class_incremental(data, np.random.RandomState(0), first, later)

    def test_labels_are_the_order_of_arrival(self):
        data = dataset(train=(5,) * 7, test=(2,) * 7, size=8)
        fields = dict(image_size=8, channels=1, mean=(0.5,), std=(0.5,), num_classes=7)
        cfg = DyToxConfig(**fields, first_classes=3, classes_per_task=2, class_order=(4, 0, 6, 1, 2, 5, 3))
        stream = task_stream(cfg, data)
        assert stream.experiences == [(4, 0, 6), (1, 2), (5, 3)]
        assert [sorted(set(stream.labels[a:b].tolist())) for a, b in ((0, 15), (15, 25), (25, 35))] == [
            [0, 1, 2],
            [3, 4],
            [5, 6],
        ]
        order = np.array(cfg.class_order)
        assert (order[stream.labels] == data.train_labels[stream.plan.rows]).all()
        assert (order[stream.test.labels] == data.test_labels).all()

    def test_other_data_than_configured(self):
        with pytest.raises(
            ValueError, match="channels: the configuration says 3, data set tiny has 1; pass --channels 1"
        ):
            task_stream(DyToxConfig(), dataset())


class TestRun:
    def test_files(self, finished):
        names = {path.name for path in finished.iterdir()}
        written = {"config.json", "stream.npz", "metrics.csv", "results.json", "checkpoint.pt", "report.html"}
        assert names == written | {".lock", "accuracy.png", "matrix.png"}

    def test_results(self, finished):
        results = json.loads((finished / "results.json").read_text())
        matrix = results["accuracy_matrix"]
        assert results["method"] == "dytox" and results["num_experts"] == 2 and results["expansions"] == [20]
        assert len(matrix) == 2 and matrix[0][1] == 0  # classes that have not come cannot be named
        assert results["final_accuracy"] == pytest.approx(np.mean(matrix[1]))
        assert results["seen_accuracy"] == pytest.approx([matrix[0][0], np.mean(matrix[1])])
        assert results["average_incremental_accuracy"] == pytest.approx(np.mean(results["seen_accuracy"]))
        assert results["forgetting"] == pytest.approx(matrix[0][0] - matrix[1][0])
        # 20 images in batches of 8 twice; then 20 and 12 of the memory, and 12 of the memory once
        assert results["updates_per_sample"] * 40 == pytest.approx(2 * 3 + 2 * 4 + 2)
        assert results["seen"] == [[10, 10, 0, 0], [0, 0, 10, 10]] and 0 <= results["route_accuracy"] <= 1

    def test_metrics(self, finished):
        rows = RunDirectory(finished).read_metrics()
        positions = [row["samples"] for row in rows]
        assert positions == sorted(set(positions)) and positions[-1] == 40
        assert [row["samples"] for row in rows if row["accuracy"] is not None] == [20, 40]
        assert all(row["experts"] == (1 if row["samples"] <= 20 else 2) for row in rows)

    def test_config(self, finished):
        content = json.loads((finished / "config.json").read_text())
        cfg = DyToxConfig(**content["config"])
        assert (cfg.embed_dim, cfg.memory_size, content["preset"]) == (8, 12, "dytox-cifar10")
        assert content["stream"]["scenario"] == "class-incremental" and content["stream"]["ends"] == [20, 40]

    @pytest.mark.parametrize("at", [2, 9, 15], ids=["first task", "second task", "fine-tuning"])
    def test_stopping_leaves_no_trace(self, at, finished, data, tmp_path):
        with pytest.raises(Interrupted, match=r"stopped and saved in task \d of 2"):
            go(tmp_path / "b", data, Watcher(at=at))
        go(tmp_path / "b", data, resume=True)
        first, second = (json.loads((path / "results.json").read_text()) for path in (finished, tmp_path / "b"))
        assert same(first, second)
        checkpoints = [torch.load(p / "checkpoint.pt", weights_only=True) for p in (finished, tmp_path / "b")]
        assert same(checkpoints[0]["learner"], checkpoints[1]["learner"])

    def test_the_floor_keeps_nothing(self, data, tmp_path):
        results = go(tmp_path / "b", data, method="finetune", limit=20, test_limit=6)
        state = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)["learner"]
        assert state["memory"]["classes"] == [] and state["teacher"] is None
        assert results["method"] == "finetune" and results["images"] == 20 and results["test_images"] == 6
        assert not any(key.startswith("head_div") for key in state["model"])
        assert load_model(RunDirectory(tmp_path / "b")).num_tasks == 2

    def test_evaluation_every_other_task(self, data, tmp_path):
        watcher = Watcher()
        results = go(tmp_path / "b", data, watcher, eval_every=2)
        assert watcher.evaluations == [(40, 1, 2)] and results["accuracy_matrix"][0] is None
        assert results["seen_accuracy"][0] is None


class TestCommands:
    def test_eval_predict_and_report_read_the_run(self, finished, data, capsys, tmp_path):
        assert cli.main(["eval", str(finished), "--data-dir", str(data), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        results = json.loads((finished / "results.json").read_text())
        assert found["accuracy"] == pytest.approx(results["final_accuracy"])
        assert sum(found["images_by_expert"]) == 12
        pictures = tmp_path / "x.npz"
        np.savez(pictures, images=np.zeros((2, 8, 8, 3), np.uint8))
        assert cli.main(["predict", str(finished), str(pictures), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 2
        assert cli.main(["report", str(finished)]) == 0
        assert "dytox-cifar10 dytox" in capsys.readouterr().out

    def test_help_lists_every_field(self, capsys):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "dytox-cifar100", "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and "B50 Inc10" in text
        for name in (*DyToxConfig().to_dict(), *vars(TaskOptions())):
            flag = {"joint": "no-joint", "augment": "no-augment"}.get(name, name)
            flag = {"distillation": "no-distillation", "freeze_old": "no-freeze-old"}.get(flag, flag)
            assert f"--{flag.replace('_', '-')}" in text, name

    @pytest.mark.parametrize(("flag", "joint"), [([], True), (["--joint"], True), (["--separate"], False)])
    def test_joint_and_separate(self, flag, joint):
        assert parse_dytox("dytox-cifar10", flag).config.joint is joint

    @pytest.mark.parametrize("preset", PRESETS)
    def test_presets_parse(self, preset):
        assert parse_dytox(preset, []).config == DyToxConfig.preset(preset)

    def test_mistakes(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["train", "dytox-cifar10", "--memory-size", "-1"]) == 2
        assert "memory_size: expected a whole number of at least 0" in capsys.readouterr().err
        assert cli.main(["train", "dytox-cifar10", "--patch-size", "5"]) == 2
        assert "patch_size: expected a divisor of image_size 32, got 5" in capsys.readouterr().err
        assert cli.main(["train", "dytox-cifa"]) == 2
        assert "Did you mean 'dytox-cifar10'" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
