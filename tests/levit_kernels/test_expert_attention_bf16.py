"""The native expert_attention and folded_attention in bfloat16: words of two channels, odd numbers of them."""

import pytest
import torch
from op_cases import OPS, backend, run_with_vectors, to_dtype
from op_errors import Measure, assert_close
from test_expert_attention_native import SIZES as OF_LANES
from test_expert_attention_native import as_of_linear
from test_folded_attention import fold

from levit_kernels import use_backend
from levit_kernels.expert_attention import expert_attention, expert_attention_reference
from levit_kernels.folded_attention import FoldedWeights, folded_attention, folded_attention_reference

SIZES = OF_LANES | {
    "published": dict(B=5, K=3, N=16, P=49, Q=100, H=3, d=100),
    "all-odd": dict(B=3, K=2, N=5, P=7, Q=13, H=3, d=11),
    "one-of-each": dict(B=1, K=1, N=1, P=1, Q=1, H=1, d=1),
    "one-expert": dict(B=9, K=1, N=16, P=6, Q=12, H=2, d=10),
    "many-experts": dict(B=2, K=64, N=4, P=3, Q=6, H=2, d=5),
    "no-image": dict(B=0, K=2, N=3, P=4, Q=6, H=1, d=5),
}
NARROW_GATES = ("none", "K", "BKH")


def draw(sizes, gates, seed=3):
    generator = torch.Generator().manual_seed(seed)
    patches, *weights, values, slope = OPS["expert_attention"].make(generator, **sizes, gates=gates)
    return (*to_dtype((patches, *weights), torch.bfloat16), None if values is None else values.float(), slope)


def folded_args(args):
    patches, w_embed, b_embed, w_qkv, b_qkv, gates, slope = args
    weights = fold(w_embed, b_embed, w_qkv, b_qkv)
    return patches, weights, gates, slope


def measured(function, draws):
    """What plain torch's errors are in bfloat16, and the oracle of the last draw."""
    plain = [function(*args) for args in draws]
    oracles = [function(*to_dtype(args, torch.float64)) for args in draws]
    measure = Measure(plain[0].dtype)
    for got, oracle in zip(plain, oracles, strict=True):
        measure.include(got, oracle)
    return oracles[-1], measure


def check(sizes, gates, order="dense"):
    draws = [draw(sizes, gates, seed) for seed in range(4)]
    oracle, measure = measured(expert_attention_reference, draws)
    args = as_of_linear(draws[-1]) if order == "linear" else draws[-1]
    with backend("cpu"):
        assert_close("result", expert_attention(*args), oracle, measure)


def check_folded(sizes, gates):
    draws = [folded_args(draw(sizes, gates, seed)) for seed in range(4)]
    oracle, measure = measured(folded_attention_reference, draws)
    with backend("cpu"):
        assert_close("folded", folded_attention(*draws[-1]), oracle, measure)


@pytest.mark.parametrize("order", ["dense", "linear"])
@pytest.mark.parametrize("gates", ["none", "K", "KH", "BKH"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_twice_the_error_of_plain_torch_at_most(sizes, gates, order):
    check(sizes, gates, order)


@pytest.mark.parametrize("gates", ["none", "K", "KH", "BKH"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_folded(sizes, gates):
    check_folded({key: value for key, value in sizes.items() if key != "zeros"}, gates)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_without_the_instruction_everything_is_widened(capability):
    """Which this machine would not choose by itself: torch's own limit is set before the first call."""
    code = """
from test_expert_attention_bf16 import *
for name in ("all-odd", "published", "one-of-each", "no-image"):
    for gates in NARROW_GATES:
        check(SIZES[name], gates)
        check_folded(SIZES[name], gates)
test_outputs_go_where_they_are_kept()
"""
    run_with_vectors(capability, code)


def off_by_one(x):
    """The same numbers two bytes further on, between NaN."""
    room = torch.full((x.numel() + 2,), torch.nan, dtype=x.dtype)
    return room[1:-1].view(x.shape).copy_(x)


def test_numbers_that_no_word_begins_with_and_nothing_read_beside_them():
    patches, w_embed, b_embed, w_qkv, b_qkv, gates, slope = draw(SIZES["all-odd"], "K")
    w_embed = off_by_one(w_embed.transpose(1, 2)).transpose(1, 2)
    w_qkv = off_by_one(w_qkv.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
    with backend("cpu"):
        aligned = expert_attention(*as_of_linear((patches, w_embed, b_embed, w_qkv, b_qkv)), gates, slope)
        shifted = (off_by_one(patches), w_embed, off_by_one(b_embed), w_qkv, off_by_one(b_qkv))
        assert torch.equal(expert_attention(*shifted, gates, slope), aligned)


def test_one_channels_nan_does_not_reach_its_neighbour():
    """Rows of odd length: the word behind a row's last weight begins with the next row's first."""
    args = list(as_of_linear(draw(SIZES["all-odd"], "none")))
    args[3][:, 0, 2, 1, 3] = torch.nan  # a value of head 1
    with backend("cpu"):
        got = expert_attention(*args).isnan()
    depth = SIZES["all-odd"]["d"]
    assert got[..., depth + 3].all() and got.sum() == got[..., 0].numel()


def test_zero_gates_skip_an_expert_nan_and_all():
    args = list(draw(SIZES["published"], "K"))
    args[3][1] = torch.nan
    args[5][1] = 0
    with backend("cpu"):
        assert expert_attention(*args).isfinite().all()


def test_dtypes_of_gates():
    *args, gates, slope = draw(SIZES["all-odd"], "K")
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wanted = expert_attention_reference(*args, gates.to(dtype), slope)
        with backend("cpu"):
            got = expert_attention(*args, gates.to(dtype), slope)
            folded = folded_attention(*folded_args((*args, gates.to(dtype), slope)))
        assert got.dtype == folded.dtype == wanted.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


def test_outputs_go_where_they_are_kept():
    patches, weights, _, slope = folded_args(draw(SIZES["published"], "none"))
    with use_backend("cpu"):
        expected = folded_attention(patches, weights, negative_slope=slope)
        experts, images, *rest = expected.shape
        store = torch.full((images + 3, experts + 1, *rest), torch.nan, dtype=torch.bfloat16)
        place = store[2:-1, :-1].transpose(0, 1)
        folded_attention(patches, weights, negative_slope=slope, out=place)
    assert torch.equal(place, expected)
    place.fill_(torch.nan)
    assert store.isnan().all(), "written beside its place"


def test_any_number_of_threads():
    args = draw(dict(B=7, K=5, N=16, P=9, Q=20, H=2, d=14), "BKH")
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            with backend("cpu"):
                seen += [expert_attention(*args), expert_attention(*args)]
            assert torch.equal(seen[-1], seen[-2])
    finally:
        torch.set_num_threads(before)
    for found in seen[1:]:
        torch.testing.assert_close(found, seen[0], rtol=1e-5, atol=1e-5)


def test_gradients_are_the_composed_ones():
    *args, gates, slope = draw(SIZES["all-odd"], "K")
    grads = {}
    for name in ("cpu", "torch"):
        leaves = [x.clone().requires_grad_() for x in (*args, gates)]
        with backend(name):
            expert_attention(*leaves, slope).square().sum().backward()
        grads[name] = [x.grad for x in leaves]
    for ours, theirs in zip(grads["cpu"], grads["torch"], strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def test_mixed_dtypes_are_refused():
    patches, w_embed, *rest = draw(SIZES["all-odd"], "none")
    with pytest.raises(TypeError, match="w_embed must be torch.bfloat16 like patches"):
        expert_attention(patches, w_embed.float(), *rest)
    weights = folded_args((patches, w_embed, *rest))[1]
    with pytest.raises(TypeError, match="w_values must be torch.bfloat16 like patches"):
        folded_attention(patches, FoldedWeights(*weights[:4], weights.w_values.float(), weights.b_values))
