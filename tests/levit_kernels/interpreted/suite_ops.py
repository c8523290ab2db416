"""The op suite on the triton backend: curated sizes, precisions and layouts, all gradients, against float64."""

import pytest
from op_cases import LAYOUTS, OPS, curated
from test_ops import check

QUICK = {
    "dkf_fuse": ("mnist-few-experts-K", "mnist-few-experts-KH-zeros", "all-rows", "odd", "one-row", "ones"),
}
CASES = [
    pytest.param(
        op, sizes, id=f"{op}-{name}", marks=() if any(name.startswith(x) for x in QUICK[op]) else pytest.mark.full
    )
    for op in QUICK
    for name, sizes in curated(op)
]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("op, sizes", CASES)
def test_result_and_gradients(op, sizes, dtype):
    check(op, sizes, dtype, "triton")


LAID_OUT = [
    pytest.param(op, {**OPS[op].sizes["odd"], **extra}, id="-".join([op, *map(str, extra.values())]))
    for op in QUICK
    for extra in ([{"gates": "K"}, {"gates": "BKH", "zeros": True}] if "H" in OPS[op].sizes["odd"] else [{}])
]


@pytest.mark.parametrize("op, sizes", LAID_OUT)
@pytest.mark.parametrize("layout, grad_layout", [(x, "expanded" if x == "sliced" else "sliced") for x in LAYOUTS])
def test_memory_layouts(op, sizes, layout, grad_layout):
    check(op, sizes, "f32", "triton", layout, grad_layout)
