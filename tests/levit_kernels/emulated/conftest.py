import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from emulator import Emulator, build

from levit_kernels.cuda.runtime import substitute


@pytest.fixture(scope="session")
def library():
    return Emulator(build())


@pytest.fixture
def emulator(library):
    library.reset()
    with substitute(library):
        yield library
    library.reset()
