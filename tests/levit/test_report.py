"""Tables, plots and the page of a run: that they show the numbers they were given."""

import copy
import html.parser
import io
import sys
import types

import numpy as np
import pytest
import torch
from helpers import build, small_config
from rich.console import Console

import levit
from levit import cli
from levit.learner import Event
from levit.progress import Progress
from levit.report import page, plots, tables
from levit.report.progress import RichDisplay
from levit.report.tensorboard import TensorBoardLog
from levit.runs import RunDirectory

CONFIG = {
    "preset": "digits",
    "command": "levit train digits",
    "config": levit.LEViTConfig.preset("digits").to_dict(),
    "options": {"method": "levit", "limit": None, "test_limit": None},
    "data": {"name": "digits", "sha256": "abc"},
    "stream": {"ends": [50, 100], "class_order": [0, 1]},
    "versions": {"torch": "2"},
}
RESULTS = {
    "final_accuracy": 0.5,
    "route_accuracy": 0.55,
    "average_accuracy": 0.625,
    "anytime_accuracy": 0.75,
    "forgetting": 0.25,
    "backward_transfer": -0.25,
    "accuracy_matrix": [[0.9, 0.0], [0.65, 0.6]],
    "num_experts": 3,
    "updates_per_sample": 0.3,
    "parameters": 1_500_000,
    "samples_per_second": 81.2,
    "peak_memory_mib": 700.2,
    "images": 100,
    "commit": "f00",
}
ROWS = [
    {"samples": 20.0, "experts": 1.0, "min_distance": None, "threshold": None, "accuracy": None},
    {"samples": 50.0, "experts": 2.0, "min_distance": 5.5, "threshold": 5.3, "accuracy": 0.45},
    {"samples": 100.0, "experts": 3.0, "min_distance": 5.2, "threshold": 5.3, "accuracy": 0.5},
]


def run(seed=0, config=None, **results):
    content = copy.deepcopy(CONFIG)
    content["config"] |= {"seed": seed} | (config or {})
    return content, RESULTS | results


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


class TestTables:
    def test_one_run(self):
        text = printed(tables.result_table([run()]))
        cells = [cell.strip() for cell in text.splitlines()[-2].strip("│").split("│")]
        assert cells == [
            "digits levit",
            *("0", "50.00", "55.00", "62.50", "75.00", "25.00", "-25.00", "3", "0.30", "1.50 M", "81", "700"),
        ]

    def test_seeds_share_a_row_with_mean_and_deviation_of_the_sample(self):
        runs = [run(seed=seed, final_accuracy=value) for seed, value in ((2, 0.5), (0, 0.6), (1, 0.9))]
        row = printed(tables.result_table(runs)).splitlines()[-2]
        assert "66.67 ± 20.82" in row and "0,1,2" in row
        assert "-25.00 ± 0.00" in row

    def test_what_differs_from_the_preset_has_its_own_row_and_is_named(self):
        limited = run()
        limited[0]["options"] |= {"limit": 300, "test_limit": 40}
        runs = [run(), run(config={"max_experts": 3, "gating": "none"}), limited]
        labels = [line.split("│")[1].strip() for line in printed(tables.result_table(runs)).splitlines()[-4:-1]]
        assert labels == [
            "digits levit",
            "digits levit gating=none max_experts=3",
            "digits levit limit=300 test_limit=40",
        ]

    def test_what_is_not_known_is_a_dash(self):
        assert "-" in printed(tables.result_table([run(forgetting=None)])).splitlines()[-2].split("│")[7]
        assert "25.00" in printed(tables.result_table([run(forgetting=None), run(1)])).splitlines()[-2].split("│")[7]

    def test_matrix(self):
        lines = printed(tables.matrix_table(RESULTS | {"accuracy_matrix": [None, [0.65, 0.6]]})).splitlines()
        assert [cell.strip() for cell in lines[-2].strip("│").split("│")] == ["2", "65.0", "60.0"]
        assert len(lines) == 6


class TestPlots:
    def test_accuracy_and_experts(self):
        figure = plots.accuracy_plot(CONFIG, ROWS, RESULTS["accuracy_matrix"])
        lines = {line.get_label(): line.get_xydata() for axes in figure.axes for line in axes.get_lines()}
        np.testing.assert_allclose(lines["accuracy, all classes"], [[50, 45], [100, 50]])
        np.testing.assert_allclose(lines["accuracy, classes seen so far"], [[50, 90], [100, 62.5]])
        np.testing.assert_allclose(lines["experts"], [[0, 1], [20, 1], [50, 2], [100, 3]])
        np.testing.assert_allclose(lines["smallest distance"], [[50, 5.5], [100, 5.2]])
        np.testing.assert_allclose(lines["threshold"], [[50, 5.3], [100, 5.3]])

    def test_no_panel_for_a_rule_that_was_never_asked(self):
        rows = [row | {"min_distance": None, "threshold": None} for row in ROWS]
        assert len(plots.accuracy_plot(CONFIG, rows, [None, [0.65, 0.6]]).axes) == 2

    def test_matrix(self):
        panel = plots.matrix_plot([None, [0.65, 0.6]]).axes[0]
        assert np.isnan(panel.images[0].get_array().filled(np.nan)[0]).all()
        assert [text.get_text() for text in panel.texts] == ["65", "60"]

    @pytest.mark.parametrize("gate_per", ["expert", "head"])
    def test_gates_are_the_softmax_of_each_expert_over_those_before_it(self, gate_per):
        model = build(levit.reference.LEViT, small_config(gate_per=gate_per), experts=3)
        shown = plots.gates_plot(model).axes[0].images[0].get_array().filled(np.nan)
        for k in range(3):
            gates = torch.softmax(model.experts[k].gates, 0).reshape(k + 1, -1).mean(1)
            np.testing.assert_allclose(shown[k, : k + 1], gates.detach())
            assert np.isnan(shown[k, k + 1 :]).all()

    def test_own_features_beside_the_gated_ones_have_no_gate(self):
        model = build(levit.reference.LEViT, small_config(fusion="concat"), experts=3)
        shown = plots.gates_plot(model).axes[0].images[0].get_array().filled(np.nan)
        assert np.isnan(shown[0]).all() and shown[1, 0] == 1 and np.isnan(shown[1, 1:]).all()
        np.testing.assert_allclose(shown[2, :2], torch.softmax(model.experts[2].gates, 0).detach())

    def test_samples_of_a_convolutional_vae_have_its_size(self):
        model = build(levit.reference.LEViT, small_config(vae="conv"), experts=1)
        figure = plots.samples_plot(model, columns=2)
        assert [axes.images[0].get_array().shape for axes in figure.axes] == [(32, 32, 3)] * 2

    @pytest.mark.parametrize("channels", [1, 3])
    def test_samples_are_drawn_from_every_vae(self, channels):
        model = build(levit.LEViT, small_config(channels=channels), experts=2)
        figure = plots.samples_plot(model, columns=4)
        shown = [axes.images[0].get_array() for axes in figure.axes]
        assert len(shown) == 8 and shown[0].shape == ((6, 6) if channels == 1 else (6, 6, 3))
        codes = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
        decoded = model.experts[1].vae.decode(codes).clamp(0, 1).detach().view(4, channels, 6, 6)
        np.testing.assert_allclose(np.atleast_3d(shown[4 + 2]), decoded[2].permute(1, 2, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real run of two experts with everything that is drawn."""
    path = tmp_path_factory.mktemp("report") / "a<b>"
    threads = torch.get_num_threads()
    small = "--embed-dim 4 --num-heads 1 --head-hidden 4 --vae-hidden 4 4 --latent-dim 2 --memory-size 40"
    arguments = [*small.split(), "--train-batch", "8", "--limit", "100", "--eval-every", "5", "--max-experts", "2"]
    assert cli.main(["train", "digits", *arguments, "--out", str(path), "--quiet", "--threads", "1"]) == 0
    torch.set_num_threads(threads)
    return path


class TestComparison:
    def test_shows_every_run(self, folder):
        runs = [RunDirectory(folder)] * 2
        figure = plots.comparison_plot(runs)
        top, middle, bottom = figure.axes
        results, rows = runs[0].read_results(), runs[0].read_metrics()
        for line in top.get_lines():
            assert line.get_xydata()[-1] == pytest.approx([100, 100 * results["final_accuracy"]], rel=1e-5)
        assert [line.get_ydata()[-1] for line in middle.get_lines()] == [rows[-1]["experts"]] * 2
        heights = [bar.get_height() for bar in bottom.patches]
        assert heights == pytest.approx([100 * value for value in results["accuracy_matrix"][-1]] * 2)

    def test_without_plots(self, folder, tmp_path):
        text = page.write_comparison([RunDirectory(folder)], tmp_path / "c.html", None).read_text()
        assert "<img" not in text and "a<b>" not in text and "route %" in text


class TestTensorBoard:
    class Writer:
        made = []

        def __init__(self, folder, purge_step=None):
            self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
            self.made.append(self)

        def add_scalar(self, name, value, step):
            self.scalars.append((name, value, step))

        def close(self):
            self.closed = True

    @pytest.fixture
    def made(self, monkeypatch):
        """Stands in for the package, which need not be installed; what it was told."""
        module = types.ModuleType("torch.utils.tensorboard")
        module.SummaryWriter = self.Writer
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        monkeypatch.setattr(self.Writer, "made", [])
        return self.Writer.made

    def test_has_the_rows_of_the_metrics(self, made, tmp_path, monkeypatch):
        monkeypatch.setattr(cli, "_write_report", lambda run, say: None)
        small = "--embed-dim 4 --num-heads 1 --head-hidden 4 --vae-hidden 4 4 --latent-dim 2 --memory-size 40"
        arguments = [*small.split(), "--train-batch", "8", "--limit", "100", "--eval-every", "5", "--quiet"]
        assert cli.main(["train", "digits", *arguments, "--out", str(tmp_path / "a"), "--tensorboard"]) == 0
        (writer,) = made
        assert writer.folder == str(tmp_path / "a" / "tensorboard") and writer.purge_step is None and writer.closed
        for row in RunDirectory(tmp_path / "a").read_metrics():
            told = {name: value for name, value, step in writer.scalars if step == row["samples"]}
            known = {name: value for name, value in row.items() if value is not None and name != "samples"}
            assert told == pytest.approx(known, rel=1e-5)

    def test_going_on_drops_what_came_later(self, made, tmp_path):
        TensorBoardLog(RunDirectory(tmp_path), 300).close()
        assert made[0].purge_step == 301

    def test_not_installed(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        assert cli.main(["train", "digits", "--out", str(tmp_path / "a"), "--tensorboard"]) == 2
        assert "--tensorboard needs the package tensorboard (pip install tensorboard)" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


class TestPage:
    def test_every_plot_is_there(self, folder):
        for name in ("accuracy.png", "matrix.png", "gates.png", "samples.png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")

    def test_is_well_formed_and_stands_alone(self, folder):
        text = (folder / "report.html").read_text()

        class Parser(html.parser.HTMLParser):
            images, words, outside = 0, [], []

            def handle_starttag(self, tag, attributes):
                for name, value in attributes:
                    if name in ("src", "href"):
                        self.images += value.startswith("data:image/png;base64,")
                        self.outside += [] if value.startswith("data:") else [value]

            def handle_data(self, data):
                self.words.append(data)

        parser = Parser()
        parser.feed(text)
        assert parser.images == 4 and not parser.outside and "<script" not in text
        words = " ".join(parser.words)
        config, results = RunDirectory(folder).read_config(), RunDirectory(folder).read_results()
        assert f"{100 * results['final_accuracy']:.2f}" in words and config["data"]["sha256"] in words
        assert "a<b>" in words and "a<b>" not in text  # the command, escaped in the file

    def test_report_write_draws_again(self, folder, capsys):
        before = (folder / "report.html").read_bytes()
        for name in ("report.html", "accuracy.png"):
            (folder / name).unlink()
        assert cli.main(["report", str(folder), "--write"]) == 0
        assert (folder / "report.html").read_bytes() == before and (folder / "accuracy.png").exists()

    def test_without_plots(self, folder):
        path = page.write_page(RunDirectory(folder), [])
        assert "<img" not in path.read_text() and "Configuration" in path.read_text()


class TestProgress:
    def test_lines_in_a_file(self):
        console = Console(file=io.StringIO(), width=80)
        progress = Progress(position=300, seconds=2.4, accuracy=0.4321)
        with RichDisplay(console, total=500, experiences=5) as display:
            display.batch(progress, Event(False, None, 1.23), 2)
            display.evaluated(progress, 1, 2)
        assert console.file.getvalue() == (
            "experience 2/5, image 300: accuracy over the whole test set 43.21 %, 2 experts, 2 s\n"
        )

    def test_a_bar_in_a_terminal(self):
        console = Console(file=io.StringIO(), width=120, force_terminal=True)
        with RichDisplay(console, total=500, experiences=5) as display:
            display.batch(Progress(position=100, seconds=1.0), Event(False, None, 1.0), 1)
            display.batch(Progress(position=300, seconds=3.0), Event(False, None, 1.234), 2)
        text = console.file.getvalue()
        assert "300/500" in text and "100 images/s" in text and "loss 1.23" in text and "experts 2" in text

    def test_quiet(self):
        console = Console(file=io.StringIO(), width=120, force_terminal=True)
        with RichDisplay(console, total=500, experiences=5, quiet=True) as display:
            display.batch(Progress(position=100, seconds=1.0), Event(False, None, 1.0), 1)
            display.evaluated(Progress(position=100, accuracy=0.5), 0, 1)
            display.say("hello")
        assert "images" not in console.file.getvalue() and "hello" not in console.file.getvalue()
