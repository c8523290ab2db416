"""What only the native kernel for one expert in training has: folded queries and keys, tiles, panels, threads."""

import pytest
import torch
from op_cases import OPS, backend, evaluate, run_with_vectors, to_dtype
from test_expert_attention_native import as_of_linear

import levit_kernels
from levit_kernels.expert_attention import expert_attention, expert_attention_reference

SIZES = {  # folding pays where B N (2 d - Q) > Q d
    "published": dict(B=9, N=16, P=49, Q=100, H=3, d=100),
    "several-query-vectors": dict(B=3, N=37, P=5, Q=9, H=2, d=6),
    "one-lane-too-many": dict(B=15, N=17, P=4, Q=14, H=1, d=21),
    "many-images-to-a-tile": dict(B=300, N=1, P=3, Q=5, H=2, d=4),
    "fewer-tokens-than-lanes": dict(B=31, N=5, P=37, Q=33, H=3, d=19),
    "wide-tokens-are-not-folded": dict(B=8, N=16, P=20, Q=40, H=4, d=10),
    "few-tokens-are-not-folded": dict(B=2, N=9, P=17, Q=50, H=2, d=50),
    "several-chunks-of-tokens": dict(B=40, N=16, P=33, Q=20, H=2, d=20),
    "weights-of-less-than-a-vector": dict(B=3, N=2, P=2, Q=1, H=3, d=1),
}
CLOSE = {torch.float32: dict(rtol=1e-3, atol=1e-4), torch.float64: dict(rtol=1e-11, atol=1e-11)}


def draw(dtype, gates="none", **sizes):
    """Arguments in a precision, a gradient to propagate, and the float64 oracle's result and gradients."""
    generator = torch.Generator().manual_seed(3)
    args = to_dtype(OPS["expert_attention"].make(generator, K=1, gates=gates, **sizes), dtype)
    exact = to_dtype(args, torch.float64)
    shape = expert_attention_reference(*args).shape
    grad = torch.randn(shape, generator=generator, dtype=torch.float64) / sizes["B"]
    out, grads = evaluate(expert_attention_reference, exact, grad)
    return args, grad, [out, *grads]


def assert_matches(args, grad, want, dtype):
    with backend("cpu"):
        out, grads = evaluate(expert_attention, args, grad)
    for got, expected in zip([out, *grads], want, strict=True):
        torch.testing.assert_close(got.double(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("order", ["dense", "linear"])
@pytest.mark.parametrize("gates", ["none", "K", "BKH"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_that_fill_vectors_tiles_and_panels_in_every_way(sizes, dtype, gates, order):
    args, grad, want = draw(dtype, gates, **sizes)
    assert_matches(args if order == "dense" else as_of_linear(args), grad, want, dtype)


def test_the_bias_of_the_keys_gets_no_gradient_when_it_cancels():
    args, grad, _ = draw(torch.float32, **SIZES["published"])
    with backend("cpu"):
        _, grads = evaluate(expert_attention, args, grad)
    assert not grads[4][0, 1].any() and grads[4][0, 0].all()


def test_a_gate_of_zero_stops_nan():
    args, grad, _ = draw(torch.float32, "BK1", **SIZES["published"])
    args[0][2, 3, 4] = torch.nan
    args[5][2] = 0
    with backend("cpu"):
        out, _ = evaluate(expert_attention, args, grad)
    assert not out[2].any() and out.isfinite().all()


@pytest.mark.parametrize("sizes", ["published", "fewer-tokens-than-lanes"])
def test_the_same_bits_whatever_the_number_of_threads(sizes):
    args, grad, _ = draw(torch.float32, "K", **SIZES[sizes])
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            with backend("cpu"):
                out, grads = evaluate(expert_attention, args, grad)
            runs.append([out, *grads])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_gradients_have_the_layout_of_their_weights():
    args, grad, _ = draw(torch.float32, **SIZES["published"])
    for given in (args, as_of_linear(args)):
        for name in ("cpu", "torch", "reference"):
            with backend(name):
                _, grads = evaluate(expert_attention, given, grad)
            assert [x.stride() for x in grads] == [x.stride() for x in given[:5]]


def test_the_backward_pass_is_that_of_the_backend_that_kept_the_activations():
    args, grad, want = draw(torch.float64, **SIZES["published"])
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]
    with backend("cpu"), levit_kernels.use_backend(None):  # nothing forced: the native one is chosen
        out = expert_attention(*leaves)
    with backend("torch"):
        grads = torch.autograd.grad(out, leaves[:5], grad)
    for got, expected in zip(grads, want[1:], strict=True):
        torch.testing.assert_close(got, expected, **CLOSE[torch.float64])


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_narrower_vectors(capability):
    """Which this machine would not choose by itself: torch's own limit is set before the first call."""
    code = """
from test_expert_attention_training import *
for sizes in SIZES.values():
    for dtype in CLOSE:
        args, grad, want = draw(dtype, "K", **sizes)
        assert_matches(as_of_linear(args), grad, want, dtype)
"""
    run_with_vectors(capability, code)
