"""The command, as a user types it: exit codes, messages of one line, run directories, going on after Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_helpers import keras_arrays, save_pictures, write_npz

from levit import cli
from levit.arguments import parse_train
from levit.config import PRESETS, LEViTConfig
from levit.methods import METHODS
from levit.runs import RunDirectory
from levit.streams import load_dataset
from levit.train import RunOptions

SMALL = "--embed-dim 8 --head-hidden 8 --vae-hidden 8 8 --latent-dim 4 --memory-size 60 --train-batch 16".split()
QUICK = ["train", "digits", *SMALL, "--limit", "150", "--eval-every", "5", "--threads", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every command runs in an empty folder, and torch's threads are put back."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture
def no_report(monkeypatch):
    """Plots take a second; one test looks at them."""
    monkeypatch.setattr(cli, "_write_report", lambda run, say: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run on digits, with its report."""
    path = tmp_path_factory.mktemp("cli") / "run"
    assert cli.main([*QUICK, "--out", str(path), "--quiet"]) == 0
    return path


def failing(capsys, code, *arguments):
    """The one line that a failing command prints."""
    assert cli.main(list(arguments)) == code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("levit: ")
    return printed.err


class TestHelp:
    @pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]], ids=str)
    def test_overview_names_every_command_and_preset(self, arguments, capsys):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in (*cli.COMMANDS, *PRESETS)) and "examples:" in text

    def test_every_field_and_option_is_a_flag_with_its_help(self, capsys):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "split-mnist", "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        for name in (
            *LEViTConfig().to_dict(),
            *vars(RunOptions()),
            "out",
            "resume",
            "data_dir",
            "download",
            "threads",
            "variant",
        ):
            flag = name.replace("_", "-")  # a switch that is on can only be turned off
            assert f"--{flag} " in text or f"--no-{flag} " in text, name
        assert "Adam steps per batch" in text and "(default: 9.4)" in text and "examples:" in text

    def test_train_alone_explains_itself(self, capsys):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "--help"])
        assert stop.value.code == 0 and "PRESET is one of digits, split-mnist" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["eval", "predict", "report", "estimate"])
    def test_other_commands(self, command, capsys):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0 and f"usage: levit {command}" in capsys.readouterr().out

    def test_methods_of_the_help_are_those_of_the_registry(self):
        assert set(typing.get_args(typing.get_type_hints(RunOptions)["method"])) == set(METHODS)

    def test_info(self, capsys):
        assert cli.main(["info"]) == 0
        assert torch.__version__ in capsys.readouterr().out


class TestMistakes:
    def test_unknown_preset(self, capsys):
        assert "Did you mean 'split-mnist'?" in failing(capsys, 2, "train", "split-mnst")

    def test_unknown_command(self, capsys):
        assert "Did you mean 'train'?" in failing(capsys, 2, "tran", "digits")

    @pytest.mark.parametrize("arguments", [[], ["--seed", "3", "digits"]], ids=str)
    def test_preset_forgotten(self, arguments, capsys):
        assert "name a preset first" in failing(capsys, 2, "train", *arguments)

    @pytest.mark.parametrize("flag", [["--sede", "3"], ["--seed", "x"], ["--gating", "maybe"]], ids=str)
    def test_wrong_flags(self, flag, capsys, here):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "digits", *flag])
        assert stop.value.code == 2 and "Traceback" not in capsys.readouterr().err
        assert not list(here.iterdir())

    def test_wrong_values(self, capsys, here):
        assert "memory_size: expected a whole number" in failing(capsys, 2, "train", "digits", "--memory-size", "0")
        assert not list(here.iterdir())

    def test_missing_data(self, capsys, here, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        message = failing(capsys, 2, "train", "split-mnist", "--data-dir", str(here / "data"))
        assert f"{here / 'data' / 'mnist.npz'}: no such file" in message and "--download" in message
        assert not list(here.iterdir())

    def test_stream_shorter_than_the_memory(self, capsys, here):
        message = failing(capsys, 2, "train", "digits", "--limit", "100")
        assert "the stream has 100 images, the memory holds 200" in message and "--memory-size 20" in message
        assert not list(here.iterdir())

    def test_devices(self, capsys, monkeypatch):
        assert "expected cpu, cuda or cuda:N, got 'gpu'" in failing(capsys, 2, *QUICK, "--device", "gpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "sees no such device" in failing(capsys, 2, *QUICK, "--device", "cuda")

    def test_threads(self, capsys):
        assert "threads: expected at least 1, got 0" in failing(capsys, 2, "train", "digits", "--threads", "0")

    @pytest.mark.parametrize("command", [["eval"], ["report"], ["predict"]], ids=str)
    def test_no_run(self, command, capsys, here):
        extra = ["x.png"] if command == ["predict"] else []
        assert "no run here" in failing(capsys, 1, *command, str(here), *extra)

    def test_resume_without_a_run(self, capsys):
        assert "no run to resume here" in failing(capsys, 1, *QUICK, "--resume")

    def test_existing_run(self, capsys, trained):
        assert "holds a finished run" in failing(capsys, 1, *QUICK, "--out", str(trained), "--quiet")

    def test_debugging_shows_the_traceback(self, monkeypatch):
        monkeypatch.setenv("LEVIT_DEBUG", "1")
        with pytest.raises(ValueError, match="no command"):
            cli.main(["tran"])


class TestTrain:
    def test_writes_a_run_and_prints_its_table(self, trained, capsys):
        names = {p.name for p in trained.iterdir()}
        files = {"config.json", "metrics.csv", "results.json", "checkpoint.pt", "accuracy.png", "report.html"}
        assert files <= names
        config = json.loads((trained / "config.json").read_text())
        assert config["config"]["embed_dim"] == config["config"]["head_dim"] == 8
        assert config["config"]["head_hidden"] == [8] and config["command"].startswith("levit train digits --embed-dim")
        assert cli.main(["report", str(trained)]) == 0
        printed = capsys.readouterr().out
        results = RunDirectory(trained).read_results()
        assert f"{100 * results['final_accuracy']:.2f}" in printed

    def test_progress_goes_to_stderr_and_the_table_to_stdout(self, no_report, capsys):
        assert cli.main(QUICK) == 0
        printed = capsys.readouterr()
        assert "accuracy over the whole test set" in printed.err and "into runs/digits-levit-seed0" in printed.err
        assert "digits levit" in printed.out and "limit=150" in printed.out

    def test_quiet(self, no_report, capsys):
        assert cli.main([*QUICK, "--quiet"]) == 0
        assert capsys.readouterr().err == ""

    def test_default_directories_never_collide(self, no_report, here):
        for _ in range(2):
            assert cli.main([*QUICK, "--method", "finetune", "--seed", "3", "--quiet"]) == 0
        names = sorted(p.name for p in (here / "runs").iterdir())
        assert names == ["digits-finetune-seed3", "digits-finetune-seed3-2"]

    def test_without_matplotlib_the_run_is_whole_and_it_is_said_once(self, monkeypatch, capsys, here):
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "levit.report.plots", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert cli.main([*QUICK, "--method", "finetune"]) == 0
        assert capsys.readouterr().err.count("matplotlib is not installed") == 1
        run = here / "runs" / "digits-finetune-seed0"
        assert (run / "results.json").exists() and not list(run.glob("*.png"))
        assert "<h2>Plots" not in (run / "report.html").read_text()

    def test_data_from_a_folder(self, no_report, here):
        write_npz(here, **keras_arrays(train=8))
        flags = ["--memory-size", "30", "--train-batch", "8", "--embed-dim", "4", "--num-heads", "1", "--threads", "1"]
        assert cli.main(["train", "split-mnist", "--data-dir", str(here), "--out", "a", "--quiet", *flags]) == 0
        config = json.loads((here / "a" / "config.json").read_text())
        assert config["data"]["source"] == str(here / "mnist.npz") and config["stream"]["images"] == 80

    def test_a_folder_of_pictures(self, no_report, here):
        for label, first in (("cat", 0), ("dog", 100)):
            save_pictures(here / "pets" / label, range(first, first + 30), 9)
        flags = "--image-size 8 --channels 1 --patch-size 4 --num-classes 2 --classes-per-task 1 --memory-size 20"
        arguments = [*flags.split(), "--train-batch", "8", "--threads", "1", "--quiet", "--out", "a"]
        assert cli.main(["train", "digits", "--dataset", "./pets", *arguments]) == 0
        stream = json.loads((here / "a" / "config.json").read_text())["stream"]
        assert stream["images"] == 48 and [c["original_label"] for c in stream["classes"]] == ["cat", "dog"]
        assert cli.main(["eval", "a"]) == 0

    def test_data_that_the_configuration_does_not_fit(self, capsys, here):
        write_npz(here, "mine", **keras_arrays(size=8, classes=4))
        message = failing(capsys, 2, "train", "digits", "--dataset", "mine.npz")
        assert "num_classes: the configuration says 10, data set mine has 4; pass --num-classes 4" in message

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            (["--variant", "levit-no-dkf"], dict(gating="none", expert="vit")),
            (["--variant=levit-dkf-fixed"], dict(gating="fixed")),
            (["--variant", "levit-dnn", "--dnn-width", "20"], dict(expert="dnn", gating="learned", dnn_width=20)),
            (["--gating", "fixed", "--variant", "levit-dnn"], dict(expert="dnn", gating="fixed")),
            ([], dict(gating="learned", expert="vit")),
        ],
        ids=lambda value: "".join(value) if isinstance(value, list) else "",
    )
    def test_variants(self, flags, expected):
        config = parse_train("digits", [*flags, "--seed", "3"]).config
        assert {name: getattr(config, name) for name in expected} == expected and config.seed == 3

    def test_a_variant_runs_and_goes_on(self, no_report, here, capsys):
        arguments = [*QUICK, "--variant", "levit-dnn", "--max-experts", "2", "--quiet", "--out", "a"]
        assert cli.main(arguments) == 0
        assert "expert=dnn" in capsys.readouterr().out
        assert cli.main([*arguments, "--resume"]) == 0

    def test_other_scenarios(self, no_report, here):
        for flags in (["permuted", "--permutations", "2"], ["drifting", "--drift", "0.5"], ["shuffled"]):
            arguments = [*QUICK, "--method", "finetune", "--quiet", "--out", flags[0], "--scenario", *flags]
            assert cli.main(arguments) == 0
            config = json.loads((here / flags[0] / "config.json").read_text())
            assert config["stream"]["scenario"] == flags[0]
            assert len(config["stream"]["ends"]) == {"permuted": 2, "drifting": 5, "shuffled": 1}[flags[0]]

    def test_class_order_in_numbers(self):
        order = "3 1 2 0 4 5 6 7 8 9".split()
        assert parse_train("digits", ["--class-order", *order]).config.class_order == tuple(map(int, order))
        assert parse_train("digits", ["--class-order", "shuffled"]).config.class_order == "shuffled"

    def test_ctrl_c_then_resume(self, no_report, monkeypatch, capsys, here):
        """In the default directory, with the run's own flags remembered; equal to a run that was not stopped."""
        assert cli.main([*QUICK, "--seed", "5", "--out", "whole", "--quiet"]) == 0

        def stop(self, progress, event, experts):
            if progress.position == 70:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(cli.RichDisplay, "batch", stop)
            assert cli.main([*QUICK, "--seed", "5"]) == 130
        assert "stopped and saved at image 70 of 150; --resume goes on" in capsys.readouterr().err
        assert "unfinished run" in failing(capsys, 1, *QUICK, "--quiet", "--out", "runs/digits-levit-seed5")
        assert cli.main(["train", "digits", "--seed", "5", "--resume", "--quiet", "--threads", "1"]) == 0
        results = [RunDirectory(path).read_results() for path in ("whole", "runs/digits-levit-seed5")]
        assert results[0]["accuracy_matrix"] == results[1]["accuracy_matrix"]
        assert results[0]["expansions"] == results[1]["expansions"]
        assert cli.main(["train", "digits", "--seed", "5", "--resume", "--quiet"]) == 0  # finished: shown again

    def test_resume_with_another_value_is_refused(self, no_report, capsys, trained):
        message = failing(capsys, 1, "train", "digits", "--out", str(trained.parent / "nowhere"), "--resume")
        assert "no run here" in message
        assert "a run of preset digits" in failing(capsys, 1, "train", "split-mnist", "--out", str(trained), "--resume")


class TestUse:
    def test_eval_agrees_with_the_run(self, trained, capsys):
        assert cli.main(["eval", str(trained), "--json", "--by-task", "--threads", "1"]) == 0
        result = json.loads(capsys.readouterr().out)
        expected = RunDirectory(trained).read_results()
        assert result["accuracy"] == expected["final_accuracy"]
        assert result["accuracy_by_experience"] == expected["accuracy_matrix"][-1]
        assert sum(result["images_by_expert"]) == len(load_dataset("digits").test_labels)
        assert len(result["images_by_expert"]) == expected["num_experts"]
        assert 0 <= result["by-task (leaks)"] <= 1

    def test_the_leaking_protocol_only_under_its_label_and_only_when_asked(self, trained, capsys):
        cli.main(["eval", str(trained)])
        assert "by-task" not in capsys.readouterr().out
        cli.main(["eval", str(trained), "--by-task"])
        assert re.search(r"^by-task \(leaks\): \d+\.\d\d %$", capsys.readouterr().out, re.MULTILINE)

    def test_eval_refuses_other_data(self, trained, capsys, here):
        run = RunDirectory(here / "copy")
        run.path.mkdir()
        config = RunDirectory(trained).read_config()
        run.write_config(config | {"data": config["data"] | {"sha256": "0"}})
        assert "trained on other data" in failing(capsys, 1, "eval", str(run.path))

    def test_predict_npz_and_pictures(self, trained, capsys, here):
        from PIL import Image

        data = load_dataset("digits")
        images = data.to_float(data.test_images[:30])
        np.savez(here / "some.npz", images=images[:, 0].numpy())
        Image.fromarray((images[3, 0] * 255).round().byte().numpy()).save(here / "one.png")
        assert cli.main(["predict", str(trained), "some.npz", "one.png", "--json"]) == 0
        answers = json.loads(capsys.readouterr().out)
        assert [a["image"] for a in answers] == [f"some.npz[{i}]" for i in range(30)] + ["one.png"]
        from levit.inference import load_model

        model = load_model(RunDirectory(trained))
        assert [a["label"] for a in answers[:30]] == model(images).argmax(1).tolist()
        assert [a["expert"] for a in answers[:30]] == model.route(images).tolist()
        confidence = model.predict(images).confidence
        assert [a["confidence"] for a in answers[:30]] == pytest.approx(confidence.tolist(), abs=1e-6)
        assert answers[30]["label"] == answers[3]["label"]

        assert cli.main(["predict", str(trained), "one.png"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split("\t") == ["image", "label", "expert", "confidence", "known"] and lines[1].startswith(
            "one.png\t"
        )

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("none.png", None, "missing, truncated or no picture"),
            ("bad.png", b"no picture", "missing, truncated or no picture"),
            ("bad.npz", b"no zip", "bad.npz: "),
            ("large.npz", dict(images=np.zeros((2, 28, 28), np.uint8)), "expected images of 8x8 pixels"),
            ("two.npz", dict(a=np.zeros((2, 8, 8)), b=np.zeros(3)), "expected one array"),
            ("empty.npz", dict(images=np.zeros((0, 8, 8))), "holds no image"),
            ("scale.npz", dict(images=np.full((2, 8, 8), 16.0)), r"floats in \[0, 1\]; got float64, 16.0 to 16.0"),
            ("nan.npz", dict(images=np.full((2, 8, 8), np.nan)), r"floats in \[0, 1\]"),
            ("ints.npz", dict(images=np.zeros((2, 8, 8), np.int64)), "expected uint8"),
            ("flat.npz", dict(images=np.zeros((2, 64))), "expected images of 8x8 pixels"),
        ],
        ids=lambda value: value if isinstance(value, str) and "." in value else "",
    )
    def test_predict_refuses(self, trained, capsys, here, name, content, said):
        if isinstance(content, bytes):
            (here / name).write_bytes(content)
        elif content is not None:
            np.savez(here / name, **content)
        message = failing(capsys, 2, "predict", str(trained), name)
        assert re.search(said, message) and name in message

    def test_eval_on_fewer_images(self, trained, capsys):
        assert cli.main(["eval", str(trained), "--json", "--test-limit", "50"]) == 0
        assert sum(json.loads(capsys.readouterr().out)["images_by_expert"]) == 50

    def test_eval_wants_the_normalisation_hook(self, trained, capsys, here):
        run = RunDirectory(here / "copy")
        run.path.mkdir()
        config = RunDirectory(trained).read_config()
        run.write_config(config | {"stream": config["stream"] | {"normalize": "whiten"}})
        assert "trained with the hook whiten; use levit.inference.evaluate" in failing(capsys, 1, "eval", str(run.path))

    def test_two_methods_side_by_side(self, trained, no_report, capsys, here):
        assert cli.main([*QUICK, "--method", "finetune", "--out", "floor", "--quiet"]) == 0
        capsys.readouterr()
        assert cli.main(["report", str(trained), "floor", "--compare", "both.html"]) == 0
        assert "written: both.html" in capsys.readouterr().out
        text = (here / "both.html").read_text()
        for run in (trained, "floor"):
            assert f"<td>{100 * RunDirectory(run).read_results()['final_accuracy']:.2f}<" in text
        assert text.count("data:image/png;base64,") == 1 and "digits finetune" in text and "digits levit" in text

    def test_report_of_several_seeds(self, trained, no_report, capsys):
        for seed in (1, 2):
            assert cli.main([*QUICK, "--seed", str(seed), "--out", f"s{seed}", "--quiet"]) == 0
        capsys.readouterr()
        assert cli.main(["report", str(trained), "s1", "s2"]) == 0
        printed = capsys.readouterr().out
        accuracies = [100 * RunDirectory(p).read_results()["final_accuracy"] for p in (trained, "s1", "s2")]
        assert f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f}" in printed and "0,1,2" in printed


class TestProcess:
    """The real entry point, in a process of its own."""

    @staticmethod
    def start(*arguments, **options):
        environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "levit", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def test_an_unknown_preset_is_one_line_and_exit_code_2(self):
        process = self.start("train", "digit")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and out == ""
        assert err.count("\n") == 1 and "Did you mean 'digits'?" in err

    def test_sigterm_saves_a_checkpoint_and_exits_with_130(self, here):
        process = self.start(*QUICK[:2], "--memory-size", "60", "--log-every", "10", "--out", "a", "--quiet")
        metrics = here / "a" / "metrics.csv"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "stopped and saved at image" in err and "Traceback" not in err
        state = RunDirectory(here / "a").load_checkpoint()
        assert 30 <= state["progress"]["position"] < 1442
