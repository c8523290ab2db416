"""What the README shows works as shown."""

import re
from pathlib import Path

import torch

from levit.arguments import parse_estimate
from levit.families import ALL_PRESETS, family_of

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    names = {}
    exec(example, names)
    assert names["event"].loss is not None and names["learner"].model.num_experts == 1  # noise has no change to find
    assert "tensor([" in capsys.readouterr().out


def test_the_command_lines_are_understood():
    """Every `levit train` and `levit estimate` of the README parses: preset, fields, options."""
    lines = re.findall(r"^levit (train|estimate) ([^#\n]*)", README, re.MULTILINE)
    assert len(lines) >= 5
    for command, rest in lines:
        preset, *options = rest.replace("…", "x").split()
        assert preset in ALL_PRESETS
        {"train": family_of(preset).parse, "estimate": parse_estimate}[command](preset, options)


def test_the_make_targets_exist():
    makefile = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w[\w-]*)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
