"""What the tests of run directories share."""

import pytest
from run_helpers import go


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, for tests that only look."""
    path = tmp_path_factory.mktemp("runs") / "a"
    go(path)
    return path
