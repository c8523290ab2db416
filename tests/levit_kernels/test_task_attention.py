"""What task_attention promises beyond the suite of all ops: T separate passes to 1e-10, tokens that do not meet."""

import pytest
import torch
from op_cases import LAYOUTS, OPS, backend, evaluate, lay_out

from levit_kernels.composed.task_forms import folds
from levit_kernels.task_attention import task_attention

SIZES = OPS["task_attention"].sizes


def folded(B, T, N, heads, d, scale=None):
    return folds(heads, T, d, N)


def test_the_cases_take_both_forms():
    assert {name for name, sizes in SIZES.items() if folded(**sizes)} >= {"cifar", "odd"}
    assert not folded(**SIZES["many-tokens"]) and not folded(**SIZES["odd-many"])


def test_the_form_follows_from_the_count_of_operations():
    """CIFAR preset: 2 N D^2 + 2 T N D for keys and values and their use, T (2 N H D + D^2) without them."""
    counts = {t: (2 * 64 * 384**2 + 2 * t * 64 * 384, t * (2 * 64 * 12 * 384 + 384**2)) for t in range(1, 60)}
    assert all(folds(12, t, 32, 64) == (without < with_) for t, (with_, without) in counts.items())
    assert folds(12, 27, 32, 64) and not folds(12, 28, 32, 64)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend_name", ["torch", "torch-small-tiles", "cpu"])
def test_equals_separate_passes_in_float64(name, backend_name):
    args = OPS["task_attention"].make(torch.Generator().manual_seed(1), **SIZES[name])
    grad = torch.randn_like(OPS["task_attention"].reference(*args))
    want, want_grads = evaluate(OPS["task_attention"].reference, args, grad)
    with backend(backend_name):
        got, grads = evaluate(task_attention, args, grad)
    for x, y in zip([got, *grads], [want, *want_grads], strict=True):
        assert (x - y).norm() <= 1e-10 * y.norm()


@pytest.mark.parametrize("tokens", [3, 11])
def test_a_token_does_not_change_the_others(tokens):
    args = list(OPS["task_attention"].make(torch.Generator().manual_seed(2), **{**SIZES["odd"], "T": tokens}))
    before = task_attention(*args)
    args[0] = args[0].clone()
    args[0][1] += 100
    after = task_attention(*args)
    others = [t for t in range(tokens) if t != 1]
    torch.testing.assert_close(after[:, others], before[:, others], rtol=0, atol=0)
    assert not torch.allclose(after[:, 1], before[:, 1])


def attend(query, own_scores, own_values, patches, wk, wv, wo, bo):
    """In float64 what the native kernel computes, one softmax over the token itself and the patches."""
    query, own_scores, own_values, patches, wk, wv, wo, bo = (
        x.double() for x in (query, own_scores, own_values, patches, wk, wv, wo, bo)
    )
    keys, values = ((patches @ w.t()).unflatten(2, query.shape[::2]) for w in (wk, wv))
    scores = torch.einsum("htc,bnhc->bhtn", query, keys)
    own = own_scores[None, :, :, None].expand(len(keys), -1, -1, 1)
    share = torch.cat([own, scores], -1).softmax(-1)
    mixed = share[..., :1] * own_values + torch.einsum("bhtn,bnhc->bhtc", share[..., 1:], values)
    return mixed.transpose(1, 2).flatten(2) @ wo.t() + bo


def core_arguments(dtype, B, T, N, H, d):
    generator = torch.Generator().manual_seed(3)

    def new(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    weights = [new(H * d, H * d, scale=(H * d) ** -0.5) for _ in range(3)]
    return [new(H, T, d), new(H, T), new(H, T, d), new(B, N, H * d), *weights, new(H * d)]


CORE_SIZES = {
    "cifar": dict(B=2, T=50, N=64, H=3, d=32),
    "several-groups-of-images": dict(B=5, T=50, N=64, H=12, d=32),
    "one-token": dict(B=3, T=1, N=6, H=2, d=8),
    "one-patch": dict(B=2, T=17, N=1, H=2, d=16),
    "odd": dict(B=3, T=19, N=7, H=3, d=5),
    "odd-depth": dict(B=2, T=33, N=31, H=2, d=37),
    "vectors-and-a-rest": dict(B=2, T=48, N=13, H=1, d=48),
    "ones": dict(B=1, T=1, N=1, H=1, d=1),
    "no-images": dict(B=0, T=3, N=4, H=2, d=5),
    "no-patches": dict(B=2, T=3, N=0, H=2, d=5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("size", CORE_SIZES)
def test_the_native_core(size, dtype, bound, layout):
    sizes = CORE_SIZES[size]
    *own, patches, wk, wv, wo, bo = core_arguments(dtype, **sizes)
    patches, wk, wv, wo, bo = (lay_out(x, layout) for x in (patches, wk, wv, wo, bo))
    room = torch.full((sizes["B"] + 2, sizes["T"], len(bo)), 7.0, dtype=dtype)
    with backend("cpu"):
        torch.ops.levit_native.task_attention(*own, patches, wk, wv, wo, bo, room[1:-1])
    want = attend(*own, patches, wk, wv, wo, bo)
    assert (room[1:-1] - want).norm() <= bound * want.norm()
    assert (room[[0, -1]] == 7).all(), "the kernel wrote beside its result"


def core(*args):
    query, patches = args[0], args[3]
    out = torch.empty(len(patches), query.shape[1], patches.shape[2], dtype=query.dtype)
    with backend("cpu"):
        torch.ops.levit_native.task_attention(*args, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_native_core_subtracts_the_maximum(dtype):
    args = core_arguments(dtype, **CORE_SIZES["odd"])
    args[:2] = 1000 * args[0], 1000 * args[1]
    atol = 5e-3 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(core(*args), attend(*args).to(dtype), rtol=0, atol=atol)


@pytest.mark.parametrize("size", ["odd", "several-groups-of-images"])
def test_neither_threads_nor_other_images_change_a_bit(size):
    args, results = core_arguments(torch.float32, **CORE_SIZES[size]), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(core(*args))
    finally:
        torch.set_num_threads(before)
    want = results[0]
    assert all(torch.equal(result, want) for result in results)
    alone = [core(*args[:3], image[None], *args[4:]) for image in args[3]]
    assert torch.equal(torch.cat(alone), want)


NAMES = ["query", "own_scores", "own_values", "patches", "wk", "wv", "wo", "bo", "out"]


@pytest.mark.parametrize("which, name", list(enumerate(NAMES)))
def test_the_native_core_names_what_does_not_fit(which, name):
    args = core_arguments(torch.float32, **CORE_SIZES["odd"])
    args.append(torch.empty(3, 19, 15))
    args[which] = args[which].double() if name != "query" else args[which].half()
    with backend("cpu"), pytest.raises(RuntimeError, match=f"task_attention: {name} must"):
        torch.ops.levit_native.task_attention(*args)
