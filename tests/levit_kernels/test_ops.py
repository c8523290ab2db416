"""Every op on every backend, in every precision, size and memory layout, with all gradients, against float64."""

import functools

import pytest
import torch
from op_cases import BACKENDS, LAYOUTS, OPS, backend, curated, evaluate, is_float, lay_out, runs, to_dtype
from op_errors import Measure, assert_close, assert_unbiased
from torch.utils._pytree import tree_leaves, tree_map

from levit_kernels import BackendError

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
PRECISIONS = {**DTYPES, "f16": torch.float16}
REFUSED_BY_CPU = {(op, "bf16") for op in ("latent_distance", "task_attention")}
CASES = [pytest.param(op, sizes, id=f"{op}-{name}") for op in OPS for name, sizes in curated(op)]


def draw(op, sizes, dtype, layout, grad_layout, seed):
    """-> arguments in their precision and layout, the gradient to propagate, oracle and plain result with gradients."""
    generator = torch.Generator().manual_seed(seed)
    args = to_dtype(OPS[op].make(generator, **sizes), PRECISIONS[dtype])
    if "gates" in sizes and dtype in ("bf16", "f16"):  # a store or weights in half precision under float32 gates
        where = 5 if op == "expert_attention" else 1
        gates = args[where]
        args = (*args[:where], None if gates is None else gates.float(), *args[where + 1 :])
    args = tree_map(lambda x: lay_out(x, layout) if is_float(x) else x, args)
    exact = to_dtype(args, torch.float64)
    like = OPS[op].reference(*args)
    grad = lay_out(torch.randn(like.shape, generator=generator).to(like.dtype), grad_layout)
    oracle, plain = (evaluate(OPS[op].reference, x, grad) for x in (exact, args))
    return args, grad, [oracle[0], *oracle[1]], [plain[0], *plain[1]]


@functools.lru_cache(maxsize=2)
def expected(op, sizes, dtype, layout, grad_layout):
    """One draw to test with, and plain torch's errors over several; kept while the backends take their turns."""
    draws = [draw(op, dict(sizes), dtype, layout, grad_layout, seed) for seed in range(4)]
    measures = [Measure(x.dtype) for x in draws[0][3]]
    for _, _, oracle, plain in draws:
        for measure, x, y in zip(measures, plain, oracle, strict=True):
            measure.include(x, y)
    return (*draws[0][:3], measures)


def check(op, sizes, dtype, name, layout="dense", grad_layout="dense"):
    args, grad, oracle, measures = expected(op, tuple(sizes.items()), dtype, layout, grad_layout)
    before = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
    with backend(name):
        out, grads = evaluate(OPS[op].function, args, grad)
        bare, _ = evaluate(OPS[op].function, args)
    assert_close("result", out, oracle[0], measures[0])
    assert_close("result without autograd", bare, oracle[0], measures[0])
    assert out.is_contiguous()
    for i, (got, want, measure) in enumerate(zip(grads, oracle[1:], measures[1:], strict=True)):
        what = f"gradient {i} of shape {list(got.shape)}"
        assert_close(what, got, want, measure)
        assert_unbiased(what, got, want, measure)
    for x, y in zip(tree_leaves(args), tree_leaves(before), strict=True):
        assert not isinstance(x, torch.Tensor) or torch.equal(x, y), "an input was written"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, sizes", CASES)
def test_result_and_gradients(op, sizes, dtype, name):
    if runs(name, op) and not (name == "cpu" and (op, dtype) in REFUSED_BY_CPU):
        check(op, sizes, dtype, name)
        return
    with backend(name), pytest.raises(BackendError, match="backend 'cpu' was forced but cannot run"):
        OPS[op].function(*to_dtype(OPS[op].make(torch.Generator(), **sizes), DTYPES[dtype]))


LAID_OUT = [
    pytest.param(op, {**OPS[op].sizes["odd"], **extra}, name, id="-".join([op, *map(str, extra.values()), name]))
    for op in OPS
    for extra in (
        [{"gates": "K"}, {"gates": "KH"}, {"gates": "BK1", "zeros": True}]
        if "H" in OPS[op].sizes["odd"]
        else [{}, {"T": 11}]
        if op == "task_attention"
        else [{}]
    )
    for name in ("torch", "torch-small-tiles", "cpu")
    if runs(name, op)
]


@pytest.mark.parametrize("op, sizes, name", LAID_OUT)
@pytest.mark.parametrize("grad_layout", ["sliced", "expanded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(op, sizes, layout, grad_layout, name):
    check(op, sizes, "f32", name, layout, grad_layout)
