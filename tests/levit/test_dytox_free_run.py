"""`levit train dytox-… --method dytox-free`: the run directory, resuming, and the commands that read it."""

import json

import numpy as np
import pytest
import torch
from dytox_helpers import images_of
from stream_helpers import write_npz
from test_dytox_run import Watcher, same

from levit import cli
from levit.detection import score
from levit.dytox.arguments import parse_dytox
from levit.dytox.free_model import FreeDyTox
from levit.dytox.run import build_training
from levit.families import family_of
from levit.inference import load_model
from levit.runs import RunDirectory
from levit.train import Interrupted, train

SMALL = (
    "--method dytox-free --image-size 8 --patch-size 4 --embed-dim 8 --num-heads 2 --depth 1 --num-classes 4 "
    "--stream-batch 4 --batch-size 12 --memory-size 12 --threads 1"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Under the name of CIFAR-10: 4 classes, 70 training images each."""
    random, arrays = np.random.RandomState(0), {}
    for part, count in (("train", 70), ("test", 5)):
        labels = random.permutation(np.repeat(np.arange(4), count))
        images = images_of(torch.from_numpy(labels), torch.Generator().manual_seed(count))
        arrays[f"x_{part}"] = (255 * images).permute(0, 2, 3, 1).byte().numpy()
        arrays[f"y_{part}"] = labels.astype(np.uint8)
    folder = tmp_path_factory.mktemp("data")
    write_npz(folder, "cifar10", **arrays)
    return folder


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    threads, path = torch.get_num_threads(), tmp_path_factory.mktemp("runs") / "a"
    assert cli.main(["train", "dytox-cifar10", *SMALL, "--data-dir", str(data), "--out", str(path), "--quiet"]) == 0
    torch.set_num_threads(threads)
    return path


class TestRun:
    def test_files_and_results(self, finished):
        names = {path.name for path in finished.iterdir()}
        written = {"config.json", "stream.npz", "metrics.csv", "results.json", "checkpoint.pt", "report.html"}
        assert names == written | {".lock", "accuracy.png", "matrix.png"}
        results = json.loads((finished / "results.json").read_text())
        assert results["method"] == "dytox-free" and results["num_experts"] == 2
        detection = score(results["expansions"], [140])
        assert detection.misses == detection.false_alarms == 0 and max(detection.delays) <= 24
        assert results["updates_per_sample"] == pytest.approx(70 / 280)
        assert results["seen"] == [[70, 70, 0, 0], [0, 0, 70, 70]]
        assert results["seen_accuracy"][1] == pytest.approx(results["final_accuracy"])
        assert "one pass, no task labels" in (finished / "report.html").read_text().lower()

    def test_rows_show_the_chart_and_its_limit(self, finished):
        rows = [row for row in RunDirectory(finished).read_metrics() if row["min_distance"] is not None]
        limit = parse_dytox("dytox-cifar10", SMALL).config.expansion_threshold
        assert {row["threshold"] for row in rows} == {float(f"{limit:.6g}")}
        assert any(row["min_distance"] > limit for row in rows)

    def test_stopping_leaves_no_trace(self, finished, data, tmp_path):
        args = parse_dytox("dytox-cifar10", SMALL)

        def go(watcher, resume):
            stream = family_of("dytox-cifar10").run_stream(args.config, args.run, data, False)
            options = dict(preset="dytox-cifar10", resume=resume, build=build_training)
            return train(RunDirectory(tmp_path / "b"), args.config, args.run, stream, watcher, **options)

        with pytest.raises(Interrupted, match="stopped and saved at image 148 of 280"):
            go(Watcher(at=37), False)
        go(Watcher(), True)
        first, second = (json.loads((path / "results.json").read_text()) for path in (finished, tmp_path / "b"))
        assert same(first, second)
        states = [torch.load(p / "checkpoint.pt", weights_only=True)["learner"] for p in (finished, tmp_path / "b")]
        assert same(*states)

    def test_other_commands_read_it(self, finished, data, capsys):
        assert cli.main(["eval", str(finished), "--data-dir", str(data), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["accuracy"] == pytest.approx(json.loads((finished / "results.json").read_text())["final_accuracy"])
        assert isinstance(load_model(RunDirectory(finished)), FreeDyTox)
        assert cli.main(["report", str(finished)]) == 0
        assert "dytox-cifar10 dytox-free" in capsys.readouterr().out
