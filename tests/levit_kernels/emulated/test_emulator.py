"""The emulator's own tests, in C++: lane layouts, bugs that it must report, and some kernels at small sizes."""

import subprocess

import pytest
from emulator import BUILD, build


def ctest(folder):
    done = subprocess.run(["ctest", "--test-dir", folder, "--output-on-failure"], capture_output=True, text=True)
    assert not done.returncode and "tests passed, 0 tests failed out of 3" in done.stdout, done.stdout + done.stderr


def test_ctest(library):
    ctest(BUILD)


@pytest.mark.full
def test_undefined_behaviour():
    folder = BUILD.with_name("emulated-ubsan")
    build(folder, "-DCMAKE_CXX_FLAGS=-fsanitize=undefined -fno-sanitize-recover=undefined")
    ctest(folder)
