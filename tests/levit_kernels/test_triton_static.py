"""What Triton's compiler emits for GPUs that are not here: nothing spilled, matrix units where products are."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from levit_kernels.triton import static
from levit_kernels.triton._static_calls import CALLS, DTYPES
from levit_kernels.triton._static_targets import TARGETS

OPS = sorted({call.op for call in CALLS})


def gate(op, targets, dtypes):
    found = list(static.measure([op], targets, dtypes))
    assert found and not [f"{x.kernel} {x.size} {x.dtype} {x.target}: {x.failure}" for x in found if x.failure]


@pytest.mark.parametrize("op", OPS)
def test_default_configurations(op):
    gate(op, ["sm_90"], ["bf16"])


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_default_configurations_everywhere(op, target):
    gate(op, [target], list(DTYPES))
