"""Bad input: the message names the op and the argument, what was expected and what came."""

import pytest
import torch
from op_cases import OPS, to_dtype
from torch.utils._pytree import tree_flatten, tree_unflatten

from levit_kernels import _vae, dkf_fuse, elbo_loss, expert_attention, task_attention

ENCODER = [f"encoder.{part}" for part in _vae.ENCODER]
DECODER = [f"decoder.{part}" for part in _vae.DECODER]
NAMES = {
    "expert_attention": ["patches", "w_embed", "b_embed", "w_qkv", "b_qkv", "gates"],
    "dkf_fuse": ["features", "gates", "index"],
    "latent_distance": ["codes", "query"],
    "expansion_distances": ["images", *ENCODER, "query", "noise"],
    "elbo_loss": ["images", *ENCODER, *DECODER, "noise"],
    "task_attention": ["tokens", "patches", "wq", "wk", "wv", "wo", "bo"],
}
EVERY = [pytest.param(op, i, id=f"{op}-{name}") for op in OPS for i, name in enumerate(NAMES[op])]
# sizes that no other argument shares
FREE = {
    ("expert_attention", "patches", 0),
    ("expert_attention", "patches", 1),
    ("dkf_fuse", "features", 0),
    ("dkf_fuse", "features", 2),
    ("dkf_fuse", "features", 3),
    ("dkf_fuse", "index", 0),
    ("latent_distance", "codes", 0),
    ("elbo_loss", "images", 0),
    ("elbo_loss", "noise", 0),
    ("task_attention", "tokens", 0),
    ("task_attention", "patches", 0),
    ("task_attention", "patches", 1),
}
MIXABLE = ("features", "gates", "index")  # stores may be half precision under float32 gates


def arguments(op):
    sizes = dict(OPS[op].sizes["odd"])
    if op in ("expert_attention", "dkf_fuse"):
        sizes["gates"] = "KH"
    return to_dtype(OPS[op].make(torch.Generator().manual_seed(0), **sizes), torch.float32)


def replaced(op, position, change):
    """The op's arguments with its position-th tensor changed."""
    leaves, spec = tree_flatten(arguments(op))
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)][position]
    leaves[where] = change(leaves[where])
    return tree_unflatten(leaves, spec)


def refuses(error, op, args, *words):
    with pytest.raises(error) as caught:
        OPS[op].function(*args)
    for word in (f"{op}:", *words):
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"


@pytest.mark.parametrize("op, position", EVERY)
def test_wrong_number_of_dimensions(op, position):
    name = NAMES[op][position]
    args = replaced(op, position, lambda x: x[None, None, None])
    refuses(ValueError, op, args, name, "must have shape", "[1, 1, 1,")


SIZED = [
    pytest.param(op, position, dim, id=f"{op}-{name}-{dim}")
    for op in OPS
    for position, name in enumerate(NAMES[op])
    for dim in range([x for x in tree_flatten(arguments(op))[0] if isinstance(x, torch.Tensor)][position].ndim)
    if (op, name, dim) not in FREE
]


@pytest.mark.parametrize("op, position, dim", SIZED)
def test_wrong_size(op, position, dim):
    """The first argument with a size binds it, so that a later one may be blamed; the message then names that one."""
    args = replaced(op, position, lambda x: torch.cat([x, x], dim))
    with pytest.raises(ValueError, match=rf"^{op}: ({'|'.join(NAMES[op])}) (must have shape \[.*=.*\], got|have H=)"):
        OPS[op].function(*args)


def test_the_message_tells_what_was_expected():
    patches, w_embed, *rest = arguments("expert_attention")
    with pytest.raises(ValueError) as caught:
        expert_attention(patches, w_embed[:, :2], *rest)
    assert str(caught.value) == "expert_attention: w_embed must have shape [K=5, P=3, Q], got [5, 2, 13]"


@pytest.mark.parametrize("op, position", EVERY)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_wrong_dtype(op, position, dtype):
    name = NAMES[op][position]
    if name == "index" and dtype == torch.int64:
        return
    refuses(TypeError, op, replaced(op, position, lambda x: x.to(dtype)), name, str(dtype))


@pytest.mark.parametrize("op, position", EVERY)
def test_mixed_precision(op, position):
    name = NAMES[op][position]
    args = replaced(op, position, lambda x: x.double() if x.is_floating_point() else x)
    if name in MIXABLE:
        assert OPS[op].function(*args).dtype == (torch.float32 if name == "index" else torch.float64)
    else:
        refuses(TypeError, op, args, "torch.float64", "torch.float32")


@pytest.mark.parametrize("op, position", EVERY)
def test_wrong_device(op, position):
    args = replaced(op, position, lambda x: x.to("meta"))
    with pytest.raises((ValueError, NotImplementedError)):
        OPS[op].function(*args)


@pytest.mark.parametrize("op", OPS)
def test_no_expert_at_all(op):
    letter = "T" if op == "task_attention" else "K"
    sizes = {**OPS[op].sizes["odd"], letter: 0}
    with pytest.raises(ValueError, match=rf"{op}: \S+ must have {letter} >= 1, got shape \["):
        OPS[op].function(*OPS[op].make(torch.Generator(), **sizes))


@pytest.mark.parametrize("row", [-1, 5, 2**40, -(2**63)])
def test_index_out_of_range(row):
    features, gates, index = arguments("dkf_fuse")
    index[3] = row
    with pytest.raises(IndexError, match=rf"dkf_fuse: index must lie in \[0, M=5\), got {row}"):
        dkf_fuse(features, gates, index)


@pytest.mark.parametrize("row", [-1, 5])
def test_index_out_of_range_with_gradients(row):
    features, gates, index = arguments("dkf_fuse")
    index[0] = row
    with pytest.raises(IndexError, match="dkf_fuse: index"):
        dkf_fuse(features, gates.requires_grad_(), index)


def test_any_row_of_an_empty_store_is_out_of_range():
    with pytest.raises(IndexError, match=r"\[0, M=0\)"):
        dkf_fuse(torch.zeros(0, 2, 3, 4), torch.ones(2), torch.zeros(1, dtype=torch.int64))


def test_heads_that_do_not_divide_the_features():
    with pytest.raises(ValueError, match="gates have H=3 heads, which must divide the features' last dimension E=4"):
        dkf_fuse(torch.zeros(2, 2, 3, 4), torch.ones(2, 3))


@pytest.mark.parametrize("shape", [(), (1, 2, 3, 4)])
def test_gates_of_another_rank(shape):
    with pytest.raises(ValueError, match=r"gates must have shape \[K\], \[K, H\], \[B, K, 1\] or \[B, K, H\]"):
        dkf_fuse(torch.zeros(2, 2, 3, 4), torch.ones(shape))


@pytest.mark.parametrize("slope", [-0.1, float("nan"), float("inf")])
def test_slope(slope):
    with pytest.raises(ValueError, match="expert_attention: negative_slope must be finite and >= 0"):
        expert_attention(*arguments("expert_attention")[:6], slope)


@pytest.mark.parametrize("beta", [float("nan"), float("inf")])
def test_beta(beta):
    images, encoder, decoder, _, noise = arguments("elbo_loss")
    with pytest.raises(ValueError, match="elbo_loss: beta must be finite"):
        elbo_loss(images, encoder, decoder, beta, noise)


@pytest.mark.parametrize("heads", [0, -3, 4, 16])
def test_heads_that_do_not_divide_the_width(heads):
    tensors = arguments("task_attention")[:7]
    with pytest.raises(ValueError, match=f"task_attention: num_heads must be >= 1 and divide D=15, got {heads}"):
        task_attention(*tensors, heads)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale(scale):
    with pytest.raises(ValueError, match="task_attention: scale must be finite"):
        task_attention(*arguments("task_attention")[:8], scale)


@pytest.mark.parametrize("op", ["expansion_distances", "elbo_loss"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_encoder_of_another_length(op, requires_grad):
    images, encoder, *rest = arguments(op)
    with pytest.raises(ValueError, match=rf"{op}: encoder must hold 8 tensors \[w1, b1, .*\], got 7"):
        OPS[op].function(images.requires_grad_(requires_grad), encoder[:-1], *rest)


def test_decoder_of_another_length():
    images, encoder, decoder, *rest = arguments("elbo_loss")
    with pytest.raises(ValueError, match=r"elbo_loss: decoder must hold 6 tensors \[w1, .*\], got 8"):
        elbo_loss(images, encoder, encoder, *rest)
