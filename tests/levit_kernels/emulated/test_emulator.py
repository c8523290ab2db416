"""The emulator's own tests, in C++: lane layouts, bugs that it must report, and some kernels at small sizes."""

import subprocess

from emulator import BUILD, SANITIZER


def test_ctest(library):
    done = subprocess.run(["ctest", "--test-dir", BUILD, "--output-on-failure"], capture_output=True, text=True)
    passed = f"tests passed, 0 tests failed out of {2 if SANITIZER else 3}"
    assert not done.returncode and passed in done.stdout, done.stdout + done.stderr
