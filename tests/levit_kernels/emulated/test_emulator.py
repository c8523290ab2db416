"""The emulator's own tests, in C++: lane layouts, and bugs that it must report."""

import subprocess

from emulator import BUILD


def test_ctest(library):
    done = subprocess.run(["ctest", "--test-dir", BUILD, "--output-on-failure"], capture_output=True, text=True)
    assert not done.returncode and "tests passed, 0 tests failed" in done.stdout, done.stdout + done.stderr
