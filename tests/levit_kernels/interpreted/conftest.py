"""The Triton kernels in Triton's interpreter. It is chosen before triton is imported, so these files need a process of
their own: tests/levit_kernels/test_triton.py starts it.

By hand: TRITON_INTERPRET=1 python -m pytest -o python_files=suite_*.py tests/levit_kernels/interpreted
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from interpreter import mend

from levit_kernels.triton import launch

_counts = {"launches": 0}


def pytest_configure(config):
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("these tests run with TRITON_INTERPRET=1 only")
    mend()


@pytest.fixture(autouse=True)
def interpreted():
    """Every kernel that a test starts must be an interpreted one."""
    from triton.runtime.interpreter import InterpretedFunction

    def listener(started):
        assert isinstance(started.kernel, InterpretedFunction), f"{started.kernel} is not interpreted"
        _counts["launches"] += 1
        return True

    with launch.listening(listener):
        yield


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"interpreted launches: {_counts['launches']}")
