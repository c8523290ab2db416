"""What the README shows works as shown."""

import re
from pathlib import Path

import torch

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    names = {}
    exec(example, names)
    assert names["learner"].model.num_experts >= 2
    assert "experts: 2" in capsys.readouterr().out


def test_the_commands_exist():
    makefile = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w[\w-]*)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
