"""The detection report: scores by hand, and the command on a small stream."""

import csv

import pytest

from levit import cli
from levit.detection import Detection, score


@pytest.mark.parametrize(
    ("expansions", "changes", "expected"),
    [
        ([], [], Detection((), 0, 0)),
        ([50], [], Detection((), 0, 1)),
        ([], [100, 200], Detection((), 2, 0)),
        ([130, 240], [100, 200], Detection((30, 40), 0, 0)),
        ([100, 130], [100, 200], Detection((30,), 1, 1)),
        ([200], [100, 200], Detection((100,), 1, 0)),
        ([110, 150, 199, 210, 500], [100, 200], Detection((10, 10), 0, 3)),
        ([20, 90], [100], Detection((), 1, 2)),
    ],
)
def test_score(expansions, changes, expected):
    assert score(expansions, changes) == expected


def test_report_trains_tells_and_does_not_repeat(tmp_path, capsys):
    command = ["report", "detection", "--streams", "digits", "digits-shuffled", "--limit", "300", "--memory-size", "40"]
    command += ["--updates-per-batch", "1", "--seeds", "0", "1", "--out", str(tmp_path), "--quiet"]
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    rows = list(csv.reader((tmp_path / "detection.csv").open()))
    assert [row[:3] for row in rows[1:]] == [
        ["digits", "calibrated", "2"],
        ["digits", "latent", "2"],
        ["digits-shuffled", "calibrated", "2"],
        ["digits-shuffled", "latent", "2"],
    ]
    assert rows[3][4:6] == ["0 of 0", "0"] and "digits-shuffled" in first
    page = (tmp_path / "detection.html").read_text()
    assert page.count("<img") == 4 and "false alarms" in page
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/results.json")}
    assert len(written) == 8
    assert cli.main(command) == 0
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/results.json")} == written


def test_an_unknown_stream_is_named(tmp_path, capsys):
    assert cli.main(["report", "detection", "--streams", "digitz", "--out", str(tmp_path)]) == 2
    assert "digitz" in capsys.readouterr().err
