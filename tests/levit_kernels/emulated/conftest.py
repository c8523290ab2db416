import pytest
from emulator import Emulator, build


@pytest.fixture(scope="session")
def library():
    return Emulator(build())


@pytest.fixture
def emulator(library):
    library.reset()
    yield library
    library.reset()
