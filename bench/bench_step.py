"""One Algorithm 1 step (full memory, 3 updates of 64, 1 check, batch of 10): reference and fused model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.cases import STEPS

pytestmark = pytest.mark.parametrize("case", STEPS, indirect=True)


@pytest.mark.parametrize("variant", ["reference", "fused"])
def test_step(time_variant: Callable[[str], None], variant: str) -> None:
    time_variant(variant)
