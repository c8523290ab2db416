"""The ops of levit_kernels: backends `torch` and `cpu` against the op's reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.cases import OPS
from bench.op_cases import BACKENDS

pytestmark = pytest.mark.parametrize("case", OPS, indirect=True)


@pytest.mark.parametrize("variant", BACKENDS)
def test_op(time_variant: Callable[[str], None], variant: str) -> None:
    time_variant(variant)
