"""What only the native expert_attention has: vector widths, chunks of images, orders of weights, threads."""

import pytest
import torch
from op_cases import OPS, backend, run_with_vectors, to_dtype

from levit_kernels.expert_attention import expert_attention, expert_attention_reference

SIZES = {
    "several-query-vectors": dict(B=3, K=2, N=37, P=5, Q=9, H=2, d=6),
    "one-lane-too-many": dict(B=5, K=2, N=17, P=4, Q=14, H=1, d=21),
    "many-images-to-a-tile": dict(B=300, K=2, N=1, P=3, Q=5, H=2, d=4),
    "several-chunks": dict(B=70, K=2, N=16, P=3, Q=2, H=2, d=500, zeros=True),
    "registers-full": dict(B=4, K=3, N=16, P=13, Q=29, H=1, d=48),
}
CLOSE = {torch.float32: dict(rtol=1e-4, atol=2e-5), torch.float64: dict(rtol=1e-12, atol=1e-12)}


def draw(dtype, **sizes):
    """Arguments in a precision, and the float64 oracle of just these."""
    args = to_dtype(OPS["expert_attention"].make(torch.Generator().manual_seed(3), **sizes), dtype)
    return args, expert_attention_reference(*to_dtype(args, torch.float64)).to(dtype)


def as_of_linear(args):
    """The same weights in the memory order of nn.Linear, inputs last."""
    patches, w_embed, b_embed, w_qkv, *rest = args
    w_embed = w_embed.transpose(1, 2).contiguous().transpose(1, 2)
    w_qkv = w_qkv.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    return (patches, w_embed, b_embed, w_qkv, *rest)


@pytest.mark.parametrize("order", ["dense", "linear"])
@pytest.mark.parametrize("gates", ["none", "KH", "BK1"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_that_fill_vectors_tiles_and_chunks_in_every_way(sizes, dtype, gates, order):
    args, want = draw(dtype, **sizes, gates=gates)
    with backend("cpu"):
        got = expert_attention(*(args if order == "dense" else as_of_linear(args)))
    torch.testing.assert_close(got, want, **CLOSE[dtype])


@pytest.mark.parametrize("sizes", [dict(B=1, K=5), dict(B=7, K=2), dict(B=9, K=4)], ids=str)
@pytest.mark.parametrize("gates", ["none", "K", "BKH"])
def test_any_number_of_threads_and_the_same_bits_each_time(sizes, gates):
    args, want = draw(torch.float32, **sizes, N=16, P=4, Q=8, H=2, d=8, gates=gates)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            with backend("cpu"):
                once, again = expert_attention(*args), expert_attention(*args)
            assert torch.equal(once, again)
            torch.testing.assert_close(once, want, **CLOSE[torch.float32])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_narrower_vectors(capability):
    """Which this machine would not choose by itself: torch's own limit is set before the first call."""
    code = """
from test_expert_attention_native import *
for sizes in SIZES.values():
    for dtype in CLOSE:
        for gates in ("none", "BK1"):
            test_sizes_that_fill_vectors_tiles_and_chunks_in_every_way(sizes, dtype, gates, "linear")
"""
    run_with_vectors(capability, code)
