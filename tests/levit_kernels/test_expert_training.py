"""The expert's classification loss with all its gradients: every backend against autograd of the formula in float64."""

import math

import pytest
import torch

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.expert_training import expert_training_gradients, expert_training_loss

NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
)
BACKENDS = [NATIVE, "torch", "reference"]
SIZES = {  # B, N, P, Q, H, d, K, hidden sizes, classes, gates per expert: 0 none, 1, or H
    "mnist": (64, 16, 49, 100, 3, 100, 4, (20,), 10, 1),  # folds queries and keys
    "cifar": (16, 16, 48, 40, 3, 20, 3, (50, 20), 10, 3),
    "odd": (7, 5, 11, 9, 2, 3, 5, (13, 5), 4, 2),
    "first": (6, 4, 8, 10, 1, 7, 1, (17,), 3, 1),
    "no-gates": (5, 9, 4, 6, 2, 5, 1, (8,), 4, 0),
    "no-hidden": (9, 3, 6, 5, 3, 4, 18, (), 6, 1),
    "ones": (2, 1, 1, 1, 1, 1, 2, (1,), 1, 1),
}


class Arguments:
    def __init__(self, name, dtype, store=None, seed=0):
        batch, length, pixels, width, self.heads, depth, experts, hidden, classes, per_expert = SIZES[name]
        generator = torch.Generator().manual_seed(seed)

        def new(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        rows = 3 * self.heads * depth
        self.patches, self.labels = 0.5 + new(batch, length, pixels), torch.arange(batch) % (classes + 1) - 1
        self.attention = [new(width, pixels) * pixels**-0.5, 1 + 0.3 * new(width), 0.3 * new(width)]
        self.attention += [new(rows, width) * width**-0.5, 0.3 * new(rows)]
        self.head, inputs = [], length * self.heads * depth
        for size in hidden:
            self.head += [new(size, inputs) * inputs**-0.5, 1 + 0.3 * new(size), 0.3 * new(size)]
            inputs = size
        self.head += [new(classes, inputs) * inputs**-0.5, 0.3 * new(classes)]
        self.gates = self.features = self.index = None
        if per_expert:
            self.gates = torch.softmax(new(*((experts,) if per_expert == 1 else (experts, per_expert))), 0)
        if experts > 1:
            self.features = new(batch + 3, experts - 1, length, self.heads * depth).to(store or dtype)
            self.index = torch.randint(batch + 3, (batch,), generator=generator)
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def leaves(self):
        return [*self.attention, *self.head, *([] if self.gates is None else [self.gates])]

    def __call__(self, op=expert_training_loss):
        args = (self.patches, self.labels, self.attention, self.head, self.heads, self.gates, self.features, self.index)
        return op(*args)

    def outcome(self, backend):
        with use_backend(backend):
            loss, *statistics = self()
            gradients = torch.autograd.grad(3 * loss, self.leaves)
        return [loss.detach(), *(g / 3 for g in gradients), *statistics]


def normalise(x, gain, shift, statistics):
    mean, variance = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
    statistics += [mean.detach(), variance.detach()]
    x = (x - mean) / torch.sqrt(variance + 1e-5) * gain + shift
    return torch.where(x > 0, x, 0.2 * x)


def exact(of):
    """The same from the equations, head by head."""
    leaves = [x.detach().double().requires_grad_() for x in of.leaves]
    w_embed, gain, shift, w_qkv, b_qkv = leaves[:5]
    head, gates = leaves[5 : 5 + len(of.head)], None if of.gates is None else leaves[-1]
    batch, length, statistics = *of.patches.shape[:2], []
    z = normalise(of.patches.double().flatten(0, 1) @ w_embed.T, gain, shift, statistics)
    projected = (z @ w_qkv.T + b_qkv).view(batch, length, 3, of.heads, -1)
    outputs = []
    for h in range(of.heads):
        q, k, v = (projected[:, :, i, h] for i in range(3))
        own = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1) @ v
        if gates is not None:
            gate = gates if gates.dim() == 1 else gates[:, h]
            own = own * gate[-1]
            for j in range(len(gates) - 1):
                stored = of.features[of.index, j].double().unflatten(-1, (of.heads, -1))[:, :, h]
                own = own + gate[j] * stored
        outputs.append(own)
    x = torch.cat(outputs, -1).flatten(1)
    for i in range(0, len(head) - 2, 3):
        x = normalise(x @ head[i].T, head[i + 1], head[i + 2], statistics)
    logits, rows = x @ head[-2].T + head[-1], (of.labels >= 0).nonzero()[:, 0]
    loss = (logits[rows].logsumexp(1) - logits[rows, of.labels[rows]]).mean()
    gradients = list(torch.autograd.grad(loss, leaves))
    if len(head) > 2:
        gradients[4][2 * len(b_qkv) // 3 :] = 0
    return [loss.detach(), *gradients, *statistics]


def assert_close(found, expected, dtype, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape and not one.requires_grad
        assert (one.double() - other).norm() <= tolerance * (other.norm() + 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_loss_gradients_and_statistics_are_those_of_float64(name, backend, dtype, tolerance):
    of = Arguments(name, dtype)
    assert_close(of.outcome(backend), exact(of), dtype, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_gradients_without_a_graph_are_the_same_bits(name, backend):
    of = Arguments(name, torch.float32)
    with use_backend(backend):
        found = of(expert_training_gradients)
        loss, *statistics = of()
    if backend != "cpu":
        assert found is None
        return
    expected = [loss, *torch.autograd.grad(loss, of.leaves), *statistics]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(x.requires_grad for x in found)
    assert torch.is_grad_enabled() and all(leaf.grad is None for leaf in of.leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "learns"), [("mnist", False), ("cifar", False), ("no-hidden", True)])
def test_a_batch_norm_behind_the_values_leaves_their_bias_exactly_as_it_is(name, learns, backend):
    of = Arguments(name, torch.float32)
    by_b_qkv = of.outcome(backend)[5]
    assert by_b_qkv.shape == of.attention[4].shape
    assert by_b_qkv[2 * len(by_b_qkv) // 3 :].any() == learns


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_in_bfloat16_is_read_as_it_is(backend):
    of = Arguments("odd", torch.float32, store=torch.bfloat16)
    assert_close(of.outcome(backend), exact(of), torch.float32, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_do_not_matter(backend):
    of = Arguments("odd", torch.float64)
    expected = of.outcome(backend)
    of.patches = of.patches.transpose(0, 2).contiguous().transpose(0, 2)
    of.features = of.features.transpose(2, 3).contiguous().transpose(2, 3)
    of.attention = [x.detach().t().contiguous().t().requires_grad_() for x in of.attention]
    assert_close(of.outcome(backend), expected, torch.float64, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_index_rows_are_in_order(backend):
    of = Arguments("odd", torch.float64)
    expected = of.outcome(backend)
    of.features, of.index = of.features[of.index], None
    assert_close(of.outcome(backend), expected, torch.float64, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_label_there_is_nothing_to_learn(backend):
    of = Arguments("odd", torch.float64)
    of.labels = torch.full_like(of.labels, -1)
    found = of.outcome(backend)
    assert not any(x.any() for x in found[: 1 + len(of.leaves)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_one_but_where_its_gate_is_zero(backend):
    of = Arguments("odd", torch.float32)
    of.features[of.index[0], 1] = torch.nan
    assert of.outcome(backend)[0].isnan()
    with torch.no_grad():
        of.gates[1] = 0
    assert of.outcome(backend)[0].isfinite()
    of.patches[0, 0, 0] = torch.nan
    assert of.outcome(backend)[0].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_it_is_the_same_loss(backend):
    of = Arguments("cifar", torch.float64)
    with torch.no_grad(), use_backend(backend):
        loss, *statistics = of()
    expected = of.outcome(backend)
    assert_close([loss, *statistics], [expected[0], *expected[1 + len(of.leaves) :]], torch.float64, 1e-12)


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
def test_any_number_of_threads_gives_the_same_bits():
    of, before, seen = Arguments("mnist", torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(of.outcome("cpu"))
    finally:
        torch.set_num_threads(before)
    for others in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], others, strict=True))


REFUSALS = [
    (dict(patches=lambda x: x[0]), ValueError, r"patches must have shape \[B, N, P\]"),
    (dict(patches=lambda x: x.double()), TypeError, "attention.w_embed must be torch.float64 like patches"),
    (dict(patches=lambda x: x[:1], labels=lambda x: x[:1], index=lambda x: x[:1]), ValueError, "must have B >= 2"),
    (dict(labels=lambda x: x.int()), TypeError, "labels must be int64, got torch.int32"),
    (dict(labels=lambda x: x[1:]), ValueError, r"labels must have shape \[B=7\], got \[6\]"),
    (dict(attention=lambda x: x[:4]), ValueError, "attention must hold 5 tensors"),
    (dict(attention=lambda x: [*x[:4], x[4][1:]]), ValueError, r"attention.b_qkv must have shape \[R=18\], got \[17\]"),
    (dict(heads=lambda x: 4), ValueError, "must have 3 rows per channel of 4 heads, got 18"),
    (dict(head=lambda x: x[1:]), ValueError, "head must be 3 per hidden layer and 2 more, got 7"),
    (
        dict(head=lambda x: [x[0][:, 1:], *x[1:]]),
        ValueError,
        r"head.w0 must have shape \[h0=13, F=30\], got \[13, 29\]",
    ),
    (dict(gates=lambda x: x[1:]), ValueError, r"features must have shape \[M=10, 3, N=5, E=6\], got"),
    (dict(gates=lambda x: None), ValueError, "features of frozen experts need gates, got None"),
    (dict(features=lambda x: None), ValueError, "gates of 5 experts need features of the others, got None"),
    (dict(index=lambda x: None), ValueError, "without an index features must have M = B = 7, got 10"),
    (dict(index=lambda x: x.int()), ValueError, r"index must be int64 \[B=7\], got torch.int32 \[7\]"),
]


@pytest.mark.parametrize("op", [expert_training_loss, expert_training_gradients])
@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_refusals(change, error, message, op):
    of = Arguments("odd", torch.float32)
    for name, edit in change.items():
        setattr(of, name, edit(getattr(of, name)))
    with pytest.raises(error, match=f"{op.__name__}: .*{message}"):
        of(op)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [expert_training_loss, expert_training_gradients])
@pytest.mark.parametrize("row", [-1, 10])
def test_an_index_outside_the_store_is_refused(row, op, backend):
    of = Arguments("odd", torch.float32)
    of.index[2] = row
    with (
        use_backend(backend),
        pytest.raises(IndexError, match=rf"{op.__name__}: index must lie in \[0, M=10\), got {row}"),
    ):
        of(op)


@pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(index=lambda x: x + 10), r"index must lie in \[0, M = 10\)"),
        (dict(index=lambda x: x[1:]), "out must be dense"),
        (dict(features=lambda x: x[:, :, 1:]), "out must be dense"),
        (dict(features=lambda x: x[:, 1:]), "gates must be dense and fit"),
        (dict(features=lambda x: x.half()), "takes float32 or bfloat16 features"),
        (dict(gates=lambda x: None), "features need gates"),
        (dict(gates=lambda x: x[:, :1].expand(-1, 3)), "gates must be dense and fit"),
        (dict(heads=lambda x: 4), "w_qkv must be dense and fit"),
        (dict(attention=lambda x: x[:4]), "5 tensors of attention"),
        (dict(attention=lambda x: [x[0].t(), *x[1:]]), "must be dense and fit"),
        (dict(patches=lambda x: x.half()), "must be float32 or float64"),
    ],
)
def test_the_kernel_itself_reads_nothing_that_is_not_there(change, message):
    of = Arguments("odd", torch.float32)
    for name, edit in change.items():
        setattr(of, name, edit(getattr(of, name)))
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        torch.ops.levit_native.expert_training(
            of.patches, of.labels, of.attention, of.head, of.gates, of.features, of.index, of.heads, 0.2, 1e-5, False
        )
