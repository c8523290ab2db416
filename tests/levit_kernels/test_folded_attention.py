"""folded_attention: the same numbers as expert_attention, on both backends, and when the model makes use of it."""

import pytest
import torch
from op_cases import OPS

from levit_kernels import expert_attention, use_backend
from levit_kernels.backends import cpu
from levit_kernels.expert_attention import expert_attention_reference
from levit_kernels.folded_attention import FoldedWeights, folded_attention, folded_scores, folding_pays

NATIVE = cpu.unavailable() is None
SIZES = {
    "published": dict(B=5, N=16, P=49, K=3, Q=100, H=3, d=100),
    "wider than deep": dict(B=3, N=9, P=12, K=2, Q=31, H=2, d=7),
    "deeper than wide": dict(B=2, N=5, P=6, K=2, Q=5, H=4, d=33),
    "one": dict(B=1, N=1, P=1, K=1, Q=1, H=1, d=1),
    "many tokens": dict(B=2, N=50, P=8, K=3, Q=20, H=2, d=18),
    "no image": dict(B=0, N=4, P=6, K=2, Q=8, H=2, d=5),
}


def arguments(name, dtype=torch.float64, linear=True):
    sizes = SIZES[name]
    generator = torch.Generator().manual_seed(3)
    B, N, P, K, Q, H, d = (sizes[x] for x in "BNPKQHd")

    def new(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    w_qkv = new(K, 3, H, d, Q).div(Q**0.5).permute(0, 4, 1, 2, 3)
    w_embed = new(K, Q, P).div(P**0.5).transpose(1, 2)
    if not linear:
        w_qkv, w_embed = w_qkv.contiguous(), w_embed.contiguous()
    args = new(B, N, P), w_embed, new(K, Q), w_qkv, new(K, 3, H, d)
    return [x.to(dtype) for x in args]


def fold(w_embed, b_embed, w_qkv, b_qkv, linear=True):
    w_scores, b_scores = folded_scores(w_qkv, b_qkv)
    if linear:
        w_scores = w_scores.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return FoldedWeights(w_embed, b_embed, w_scores, b_scores, w_qkv[:, :, 2], b_qkv[:, 2])


def gates_of(kind, B, K, H):
    shape = {"none": None, "expert": (K,), "head": (K, H), "image": (B, K, H)}[kind]
    if shape is None:
        return None
    gates = torch.rand(shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return gates * (gates > 0.3)


@pytest.mark.parametrize("kind", ["none", "expert", "head", "image"])
@pytest.mark.parametrize("linear", [True, False], ids=["linear", "dense"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", SIZES)
def test_the_same_numbers_as_expert_attention(name, backend, linear, kind):
    if backend == "cpu" and not NATIVE:
        pytest.skip(f"native kernels: {cpu.unavailable()}")
    args = arguments(name, linear=linear)
    gates = gates_of(kind, len(args[0]), args[3].shape[0], args[3].shape[3])
    expected = expert_attention_reference(*args, gates)
    with use_backend(backend):
        found = folded_attention(args[0], fold(*args[1:], linear), gates)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert found.is_contiguous()


@pytest.mark.skipif(not NATIVE, reason=f"native kernels: {cpu.unavailable()}")
@pytest.mark.parametrize("name", SIZES)
def test_float32_is_as_close_as_unfolded(name):
    single = arguments(name, torch.float32)
    exact = expert_attention_reference(*[x.double() for x in single])
    found = folded_attention(single[0], fold(*single[1:]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not NATIVE, reason=f"native kernels: {cpu.unavailable()}")
def test_any_number_of_threads_and_float64_gates():
    args = arguments("published", torch.float32)
    weights, gates = fold(*args[1:]), gates_of("image", 5, 3, 3)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(folded_attention(args[0], weights, gates))
    finally:
        torch.set_num_threads(before)
    expected = expert_attention(*args, gates)
    for found in seen:
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", SIZES)
def test_outputs_go_where_they_are_kept(name, backend):
    if backend == "cpu" and not NATIVE:
        pytest.skip(f"native kernels: {cpu.unavailable()}")
    args = arguments(name)
    weights, expected = fold(*args[1:]), expert_attention_reference(*args)
    experts, images, *rest = expected.shape
    store = torch.full((images + 3, experts + 1, *rest), torch.nan, dtype=expected.dtype)
    place = store[2:-1, :-1].transpose(0, 1)
    with use_backend(backend):
        found = folded_attention(args[0], weights, out=place)
    assert found is place
    torch.testing.assert_close(place, expected, rtol=1e-11, atol=1e-11)
    place.fill_(torch.nan)
    assert store.isnan().all(), "written beside its place"


@pytest.mark.skipif(not NATIVE, reason=f"native kernels: {cpu.unavailable()}")
def test_values_are_read_where_they_lie_between_queries_and_keys():
    args = arguments("published")
    weights = fold(*args[1:])
    linear = weights.w_values.permute(0, 2, 3, 1)
    assert not linear.is_contiguous() and linear[1].is_contiguous()
    copied = weights._replace(w_values=linear.contiguous().permute(0, 3, 1, 2))
    assert torch.equal(folded_attention(args[0], weights), folded_attention(args[0], copied))


def test_when_folding_pays():
    wide, deep = arguments("wider than deep")[3], arguments("deeper than wide")[3]
    assert not folding_pays(wide) and folding_pays(deep) == NATIVE
    assert folding_pays(deep.bfloat16()) == NATIVE and not folding_pays(deep.half())
    with use_backend("reference"):
        assert not folding_pays(deep)


def test_refusals():
    patches, *weights = arguments("published")
    folded = fold(*weights)
    with pytest.raises(ValueError, match=r"folded_attention: w_scores must have shape \[K=3, Q=100, H=3, Q=100\]"):
        folded_attention(patches, folded._replace(w_scores=folded.w_scores[..., 1:]))
    with pytest.raises(TypeError, match="folded_attention: b_values must be torch.float64 like patches"):
        folded_attention(patches, folded._replace(b_values=folded.b_values.float()))
    with pytest.raises(ValueError, match="folded_attention: negative_slope must be finite and >= 0, got -1"):
        folded_attention(patches, folded, negative_slope=-1)
    found = folded_attention(patches, folded)
    with pytest.raises(ValueError, match="folded_attention: out must be None where gates are given"):
        folded_attention(patches, folded, torch.ones(3).double(), out=found)
    with pytest.raises(TypeError, match="folded_attention: out must be torch.float64 like patches"):
        folded_attention(patches, folded, out=found.float())
    for wrong in (found[:, :, 1:], found[:, :-1], found.mT.contiguous().mT, found[..., :1].expand_as(found)):
        with pytest.raises(ValueError, match="folded_attention: out must (be|have)"):
            folded_attention(patches, folded, out=wrong)


def test_op_cases_fold_too():
    args = OPS["expert_attention"].make(torch.Generator().manual_seed(1), B=3, N=4, P=5, K=2, Q=6, H=2, d=7)
    patches, w_embed, b_embed, w_qkv, b_qkv, *rest = args
    gates = rest[0] if rest else None
    folded = folded_attention(patches, fold(w_embed, b_embed, w_qkv, b_qkv), gates)
    torch.testing.assert_close(folded, expert_attention_reference(patches, w_embed, b_embed, w_qkv, b_qkv, gates))
