"""What torch expects of an op: opcheck, compile, autocast, inference mode, empties, one derivative, NaN and Inf."""

import pytest
import torch
from op_cases import OPS, backend, evaluate, is_float, runs, to_dtype
from torch.utils._pytree import tree_leaves, tree_map

from levit_kernels import gates as gating

GATED = ("expert_attention", "dkf_fuse")
PRODUCTS = ("expert_attention", "task_attention")  # which autocast runs in half precision
REASSOCIATED = ("task_attention",)  # infinite and NaN may change places there
VARIANTS = [
    *[
        ("expert_attention", dict(B=2, K=k, N=3, P=5, Q=7, H=2, d=4, gates=g))
        for k in (1, 3)
        for g in ("none", "K", "BKH")
    ],
    *[("dkf_fuse", dict(M=5, K=3, N=2, H=2, d=4, gates=g, B=b)) for g in ("K", "KH", "BK1") for b in (None, 4)],
    ("latent_distance", dict(K=3, M=4, L=5)),
    ("expansion_distances", dict(K=3, M=4, F=6, h1=5, h2=7, L=2)),
    ("expansion_distances", dict(K=3, M=4, F=6, h1=5, h2=7, L=2, noise=False)),
    ("elbo_loss", dict(B=4, K=3, F=6, h1=5, h2=7, L=2, g1=8, g2=9)),
    ("elbo_loss", dict(B=4, K=3, F=6, h1=5, h2=7, L=2, g1=8, g2=9, S=3)),
    *[("task_attention", dict(B=2, T=t, N=5, heads=2, d=4, scale=s)) for t, s in ((2, None), (9, 0.3))],
]
VARIANTS = [pytest.param(op, sizes, id=f"{op}-{i}") for i, (op, sizes) in enumerate(VARIANTS)]
OP = pytest.mark.parametrize("op", OPS)


def make(op, dtype=torch.float32, seed=0, **changes):
    sizes = {**OPS[op].sizes["odd"], **changes}
    return to_dtype(OPS[op].make(torch.Generator().manual_seed(seed), **sizes), dtype)


def on_backends(*names, ops=tuple(OPS)):
    """Every op on every named backend that has a kernel for it."""
    return pytest.mark.parametrize("op, name", [(op, name) for op in ops for name in names if runs(name, op)])


def requiring_grad(args):
    return tree_map(lambda x: x.clone().requires_grad_() if is_float(x) else x, args)


@pytest.mark.parametrize("op, sizes", VARIANTS)
def test_opcheck(op, sizes):
    args = to_dtype(OPS[op].make(torch.Generator().manual_seed(0), **sizes), torch.float32)
    overload = getattr(torch.ops.levit_kernels, op).default
    torch.library.opcheck(overload, requiring_grad(args))
    torch.library.opcheck(overload, args)


@pytest.mark.parametrize("op, sizes", VARIANTS)
def test_opcheck_of_the_backward(op, sizes):
    args = to_dtype(OPS[op].make(torch.Generator().manual_seed(0), **sizes), torch.float32)
    grad = torch.randn_like(OPS[op].reference(*args))
    tensors = [x for x in tree_leaves(args, is_leaf=lambda x: x is None) if x is None or isinstance(x, torch.Tensor)]
    needs = [is_float(x) for x in tensors if x is None or x.is_floating_point()]
    if op == "dkf_fuse":
        needs = [True, True]
    if op == "task_attention":  # a scale of None is no tensor
        needs = [True] * 7
    saved = [[]] if op == "expert_attention" else []
    backward = getattr(torch.ops.levit_kernels, f"{op}_backward").default
    torch.library.opcheck(backward, (grad, *args, *saved, needs))


@pytest.mark.parametrize("op, sizes", VARIANTS)
def test_compiles_whole_without_recompiling_over_batch_sizes(op, sizes):
    torch._dynamo.reset()
    compiled = torch.compile(OPS[op].function, fullgraph=True, dynamic=True, backend="aot_eager")
    batch = "M" if op in ("latent_distance", "expansion_distances") or sizes.get("B", 0) is None else "B"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (11, 13, 17, 19, 23):  # unlike every other size: equal sizes are taken to be one symbol
            exact = OPS[op].make(torch.Generator().manual_seed(size), **{**sizes, batch: size})
            args = to_dtype(exact, torch.float32)
            grad = torch.randn_like(OPS[op].reference(*args))
            out, grads = evaluate(compiled, args, grad)
            want, want_grads = evaluate(OPS[op].reference, exact, grad.double())
            torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-4)
            for x, y in zip(grads, want_grads, strict=True):
                torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)


@OP
def test_default_arguments_compile_and_run(op):
    """The dispatcher drops trailing arguments that equal their defaults; kernels must put them back."""
    args = make(op, **({"scale": None} if op == "task_attention" else {}))
    short = (
        args[:5]
        if op == "expert_attention"
        else args[:3]
        if op == "elbo_loss"
        else args[:2]
        if op == "dkf_fuse"
        else args[:8]
        if op == "task_attention"
        else args
    )
    if op == "dkf_fuse":
        short = (make(op, B=None)[0], short[1])
    torch._dynamo.reset()
    compiled = torch.compile(OPS[op].function, fullgraph=True, backend="aot_eager")
    want = OPS[op].reference(*short)
    torch.testing.assert_close(OPS[op].function(*short), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(*short), want, rtol=1e-4, atol=1e-5)


@OP
def test_second_derivative_is_refused_and_the_op_named(op):
    args = requiring_grad(make(op))
    leaves = [x for x in tree_leaves(args) if is_float(x)]
    grads = torch.autograd.grad(OPS[op].function(*args).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=f"levit_kernels.{op} is differentiable once"):
        sum(g.square().sum() for g in grads).backward()


@OP
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_only_the_gradients_asked_for_are_computed(op, name):
    """Each tensor alone: its gradient is the same as among all others, and the rest stays without."""
    args = make(op, torch.float64)
    like = OPS[op].reference(*args)
    grad = torch.randn_like(like)
    _, every = evaluate(OPS[op].reference, args, grad)
    positions = [i for i, x in enumerate(tree_leaves(args)) if is_float(x)]
    for position, want in zip(positions, every, strict=True):
        count = iter(range(1000))
        alone = tree_map(
            lambda x, n=count, p=position: x.clone().requires_grad_(next(n) == p) if is_float(x) else (next(n), x)[1],
            args,
        )
        with backend(name):
            OPS[op].function(*alone).backward(grad)
        for i, leaf in enumerate(tree_leaves(alone)):
            if i == position:
                torch.testing.assert_close(leaf.grad, want)
            elif is_float(leaf):
                assert leaf.grad is None


@OP
def test_inference_mode_and_no_grad(op):
    args = make(op)
    want = OPS[op].reference(*args)
    with torch.inference_mode():
        torch.testing.assert_close(OPS[op].function(*args), want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        out = OPS[op].function(*requiring_grad(args))
    assert not out.requires_grad and out.grad_fn is None


@OP
def test_autocast(op):
    """Products in bfloat16, gates, distances and losses not; gradients in the parameters' own precision."""
    args = requiring_grad(make(op))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = OPS[op].function(*args)
    assert out.dtype == (torch.bfloat16 if op in PRODUCTS else torch.float32)
    out.float().sum().backward()
    for leaf in tree_leaves(args):
        if is_float(leaf):
            assert leaf.grad.dtype == torch.float32
    if op in PRODUCTS:
        halves = to_dtype(args, torch.bfloat16)
        assert torch.equal(out, OPS[op].function(*halves))
    if op == "expert_attention":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gated = OPS[op].function(*args[:5], torch.ones(args[1].shape[0]))
        assert gated.dtype == torch.float32
    elif op != "task_attention":
        assert torch.equal(out, OPS[op].function(*args))


@OP
def test_halves_under_autocast_give_float32_distances_and_losses(op):
    args = make(op, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = OPS[op].function(*args)
    assert out.dtype == (torch.bfloat16 if op in (*GATED, *PRODUCTS) else torch.float32)


@on_backends("reference", "torch", "cpu")
def test_empty_batch(op, name):
    batch = "M" if op in ("latent_distance", "expansion_distances") else "B"
    args = make(op, **{batch: 0})
    want = OPS[op].reference(*args)
    with backend(name):
        out, grads = evaluate(OPS[op].function, args, torch.ones_like(want))
    assert out.shape == want.shape and out.dtype == want.dtype
    assert torch.equal(out.isnan(), want.isnan())  # distances over no sample: the mean of nothing
    for grad, leaf in zip(grads, (x for x in tree_leaves(args) if is_float(x)), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize("kind", ["K", "KH", "BK1", "BKH"])
def test_empty_batch_under_gates(op, kind):
    args = make(op, B=0, gates=kind)
    out, grads = evaluate(OPS[op].function, args, torch.ones_like(OPS[op].reference(*args)))
    assert out.numel() == 0 and not any(g.any() for g in grads)


@on_backends("torch", "torch-small-tiles", "cpu")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_pass_through_as_in_the_reference(op, value, name):
    args = make(op)
    leaves = [x for x in tree_leaves(args) if is_float(x)]
    for leaf in leaves:
        kept = leaf.flatten()[0].clone()
        leaf.view(-1)[0] = value
        want = OPS[op].reference(*args)
        with backend(name):
            got = OPS[op].function(*args)
        if op in REASSOCIATED:
            assert torch.equal(got.isfinite(), want.isfinite()), f"pattern of the finite, {list(leaf.shape)}"
            got, want = (torch.where(want.isfinite(), x, 0) for x in (got, want))
        assert torch.equal(got.isnan(), want.isnan()), f"NaN pattern, {list(leaf.shape)}"
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)
        leaf.view(-1)[0] = kept


@on_backends("reference", "torch", "torch-small-tiles", "cpu", ops=GATED)
@pytest.mark.parametrize("kind", ["K", "KH", "BK1", "BKH"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_expert_is_seen_exactly_where_its_gate_is_not_zero(op, broken, kind, name):
    args = list(make(op, torch.float64, gates=kind, zeros=True))
    where, gates = (2, 5) if op == "expert_attention" else (0, 1)
    healthy = OPS[op].reference(*args)
    alive = gating.expand(args[gates]) != 0  # [B or 1, K, H or 1]
    share = alive.double().mean((0, 2))
    k = int(torch.where(share < 1, (share - 0.5).abs(), 1).argmin())
    args[where] = args[where].clone()
    (args[where] if op == "expert_attention" else args[where].transpose(0, 1))[k] = broken
    seen = alive[:, k, None].repeat_interleave(healthy.shape[2] // alive.shape[2], 2).expand_as(healthy)
    assert not seen.all() and (kind == "K" or seen.any())
    with backend(name):
        got = OPS[op].function(*args)
    assert torch.equal(got.isfinite(), ~seen)
    torch.testing.assert_close(got[~seen], healthy[~seen])


def test_coinciding_codes_have_a_zero_gradient():
    codes, query = torch.zeros(2, 3, 4), torch.zeros(3, 4)
    for name in ("reference", "torch", "cpu"):
        with backend(name):
            out, grads = evaluate(OPS["latent_distance"].function, (codes, query), torch.ones(2))
        assert not out.any() and not any(g.any() for g in grads)
    args = make("expansion_distances", noise=False)
    encoder = [torch.zeros_like(x) for x in args[1]]
    args = (args[0], encoder, torch.zeros_like(args[2]), None)
    for name in ("reference", "torch"):
        with backend(name):
            out, grads = evaluate(OPS["expansion_distances"].function, args, torch.ones(len(encoder[0])))
        assert not out.any() and not any(g.any() for g in grads)


def test_fresh_memory_is_nan_in_these_tests():
    """Otherwise an output that was never written could pass."""
    assert torch.empty(1000).isnan().all()
