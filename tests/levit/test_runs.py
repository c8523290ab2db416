"""Run directories: what they record, and where they lie."""

import json

import numpy as np
import pytest
import torch
from run_helpers import Watcher, checkpoint, config, equal, go, metrics

from levit.config import LEViTConfig
from levit.inference import load_model
from levit.learner import Event
from levit.progress import Progress
from levit.runs import RunDirectory, RunError, latest_run_path, new_run_path
from levit.streams import load_dataset


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
