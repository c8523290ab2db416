"""The op suite on the triton backend: curated sizes, precisions and layouts, all gradients, against float64."""

import pytest
import torch
from op_cases import LAYOUTS, OPS, curated, evaluate, to_dtype
from test_ops import check

import levit_kernels

# the interpreter takes a tenth of a millisecond per operation and program: `make test` runs these, the rest is "full"
QUICK = {
    "f32": """
        expert_attention-odd-BKH-zeros expert_attention-one-token-KH-zeros expert_attention-one-token-none
        expert_attention-ones-BK1 dkf_fuse-all-rows-K dkf_fuse-odd-BKH dkf_fuse-odd-KH-zeros dkf_fuse-one-row-BK1-zeros
        dkf_fuse-ones-K latent_distance-cifar latent_distance-odd latent_distance-ones expansion_distances-odd
        expansion_distances-mean-codes expansion_distances-ones elbo_loss-one-expert elbo_loss-ones
        task_attention-odd task_attention-odd-many task_attention-fifty-tokens task_attention-ones
    """.split(),
    "bf16": """
        expert_attention-one-token-none expert_attention-one-token-BK1-zeros dkf_fuse-all-rows-BKH dkf_fuse-odd-K
        latent_distance-odd expansion_distances-one-expert elbo_loss-one-expert
        task_attention-one-token task_attention-one-patch
    """.split(),
    "f16": """
        expert_attention-one-token-K dkf_fuse-all-rows-KH latent_distance-odd expansion_distances-one-expert
        elbo_loss-one-expert task_attention-one-token task_attention-one-patch
    """.split(),
}
CASES = [
    pytest.param(op, sizes, dtype, id=f"{op}-{name}-{dtype}", marks=[] if quick else pytest.mark.full)
    for dtype in QUICK
    for op in OPS
    for name, sizes in curated(op)
    for quick in [f"{op}-{name}" in QUICK[dtype]]
]


@pytest.mark.parametrize("op, sizes, dtype", CASES)
def test_result_and_gradients(op, sizes, dtype):
    check(op, sizes, dtype, "triton")


def test_the_quick_cases_exist():
    known = {f"{op}-{name}" for op in OPS for name, _ in curated(op)}
    assert not {name for names in QUICK.values() for name in names} - known


SMALL = {"expert_attention": "one-token", "dkf_fuse": "one-row", "expansion_distances": "one-expert"}
SMALL |= {"latent_distance": "odd", "elbo_loss": "one-expert", "task_attention": "one-token"}
# expanded, all rows of "odd" are one, and what that draw makes of the 22 bits of 3 TF32 products exceeds the bound
LARGER = {"task_attention": "odd-many"}
LAID_OUT = [
    pytest.param(op, {**case.sizes[name], **extra}, id="-".join([op, name, *map(str, extra.values())]), marks=marks)
    for op, case in OPS.items()
    for name, marks in ((SMALL[op], []), (LARGER.get(op, "odd"), [pytest.mark.full]))
    for extra in ([{"gates": "KH"}, {"gates": "BK1", "zeros": True}] if "H" in case.sizes["odd"] else [{}])
]


@pytest.mark.parametrize("op, sizes", LAID_OUT)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_memory_layouts(op, sizes, layout):
    assert layout in LAYOUTS
    check(op, sizes, "f32", "triton", layout, "expanded" if layout == "sliced" else "sliced")


@pytest.mark.parametrize("tokens", [2, 5], ids=["folded", "projected"])
def test_task_attention_computes_the_gradients_that_are_asked_for(tokens):
    sizes = dict(B=2, T=tokens, N=3, heads=2, d=3)
    args = to_dtype(OPS["task_attention"].make(torch.Generator().manual_seed(0), **sizes), torch.float32)
    grad = torch.randn(2, tokens, 6, generator=torch.Generator().manual_seed(1))
    with levit_kernels.use_backend("triton"):
        _, every = evaluate(levit_kernels.task_attention, args, grad)
        for i, want in enumerate(every):
            one = args[i].clone().requires_grad_()
            out = levit_kernels.task_attention(*args[:i], one, *args[i + 1 :])
            assert torch.equal(*torch.autograd.grad(out, one, grad), want)
