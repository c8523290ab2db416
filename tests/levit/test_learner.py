"""Algorithm 1: when it updates, grows, forgets and refuses; and that stopping leaves no trace. Both models."""

import copy
import inspect

import pytest
import torch
from helpers import random_images, random_labels, small_config

import levit

KINDS = {"reference": levit.reference.LEViT, "fused": levit.LEViT}


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    return KINDS[request.param]


def make(kind, dtype=torch.float64, **overrides):
    return levit.Learner(kind(small_config(**overrides)).to(dtype))


def stream(learner, batches, first=0, size=4):
    """Batches `first`..`batches` of an endless random stream; each depends on its number alone."""
    dtype = learner.model.active.embed.weight.dtype
    for i in range(first, batches):
        yield random_images(learner.cfg, size, dtype, seed=100 + i), random_labels(learner.cfg, size, seed=1000 + i)


def run(learner, batches, first=0, size=4):
    return [learner.observe(*batch) for batch in stream(learner, batches, first, size)]


def snapshot(learner):
    return copy.deepcopy(learner.state_dict())


def equal(a, b):
    """Bit-equal, all the way down."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_no_update_before_the_memory_holds_a_minibatch(kind):
    losses = [event.loss for event in run(make(kind), 4)]
    assert losses[0] is None and all(isinstance(loss, float) for loss in losses[1:])


def test_first_expansion_is_unconditional_and_clears_the_memory(kind):
    learner = make(kind, gamma=1e9)
    events = run(learner, 5)
    assert [event.expanded for event in events] == [False] * 4 + [True]
    assert learner.model.num_experts == 2 and len(learner.memory) == 0 and events[-1].distances is None


def test_a_rule_that_never_fires_drops_the_oldest(kind):
    learner = make(kind, gamma=1e9)
    events = run(learner, 20)
    assert learner.model.num_experts == 2 and len(learner.memory) == 16
    assert events[-1].distances.shape == (1,) and not events[-1].distances.requires_grad
    assert sorted(learner.memory.positions[learner.memory.live()].tolist()) == list(range(64, 80))


def test_a_rule_that_always_fires_grows_each_time_the_memory_fills(kind):
    learner = make(kind, gamma=1e-9)
    events = run(learner, 20)
    assert [i for i, event in enumerate(events) if event.expanded] == [4, 9, 14, 19]
    assert learner.model.num_experts == 5 and events[-1].distances.shape == (3,)


def test_max_experts_stops_growth_and_keeps_the_memory_full(kind):
    learner = make(kind, gamma=1e-9, max_experts=2)
    events = run(learner, 15)
    assert learner.model.num_experts == 2 and learner.memory.full and events[-1].distances is None


def test_an_expansion_starts_afresh(kind):
    learner = make(kind, gamma=1e-9)
    run(learner, 4)
    optimizer = learner.optimizer
    run(learner, 5, first=4)
    fresh = kind(learner.cfg).double()
    fresh.add_expert()
    assert learner.optimizer is not optimizer and not learner.optimizer.state
    assert equal(dict(learner.model.active.state_dict()), dict(fresh.active.state_dict()))


def test_updates_per_batch_overrides_the_configuration(kind):
    learner = levit.Learner(kind(small_config()).double(), updates_per_batch=5)
    run(learner, 2)
    assert next(iter(learner.optimizer.state.values()))["step"] == 5


def test_loss_goes_down(kind):
    learner = make(kind, gamma=1e9, max_experts=1, updates_per_batch=10, learning_rate=1e-2)
    images, labels = random_images(learner.cfg, 4), random_labels(learner.cfg, 4)
    losses = [learner.observe(images, labels).loss for _ in range(12)]
    assert losses[-1] < 0.5 * losses[1]


def test_the_learner_never_receives_a_task_label():
    assert list(inspect.signature(levit.Learner.observe).parameters) == ["self", "images", "labels"]
    assert list(inspect.signature(levit.LEViT.forward).parameters) == ["self", "images"]


@pytest.mark.parametrize("gating", ["learned", "fixed", "none"])
def test_frozen_experts_never_move(kind, gating):
    """Bit for bit, batch-norm buffers included, through training, expansion, checks and inference in train mode."""
    learner = make(kind, gamma=1e-9, gating=gating)
    kept = []
    for i, (images, labels) in enumerate(stream(learner, 25)):
        expanded = learner.observe(images, labels).expanded
        learner.model.train()
        learner.model(images)
        if expanded:
            kept.append(copy.deepcopy(learner.model.experts[-2].state_dict()))
        for expert, state in zip(learner.model.experts, kept, strict=False):
            assert equal(dict(expert.state_dict()), dict(state)), f"batch {i}"
    assert len(kept) == 5


@pytest.mark.parametrize("size", [4, 3], ids=["even batches", "batches that leave the memory in parts"])
@pytest.mark.parametrize("stop", [3, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_resuming_equals_not_stopping(kind, dtype, stop, size, tmp_path):
    """Through a file, bit for bit, across expansions."""
    overrides = dict(gamma=2.4, memory_size=20, vae_hidden=(13, 8))
    straight = make(kind, dtype, **overrides)
    events = run(straight, 24, size=size)
    assert straight.model.num_experts > 2
    first = make(kind, dtype, **overrides)
    run(first, stop, size=size)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = make(kind, dtype, **overrides)
    run(resumed, 2, size=size)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again = run(resumed, 24, first=stop, size=size)
    assert [event.loss for event in again] == [event.loss for event in events[stop:]]
    assert equal([event.distances for event in again], [event.distances for event in events[stop:]])
    assert equal(resumed.state_dict(), straight.state_dict())


def bad_inputs(cfg):
    images, labels = random_images(cfg, 4), random_labels(cfg, 4)
    nan, high = images.clone(), images * 255
    nan[1, 0, 2, 2] = float("nan")
    inf = images.clone()
    inf[0, 0, 0, 0] = float("inf")
    return {
        "size": (images[..., :4], labels, ValueError, r"images: expected \[B, 3, 6, 6\], got \[4, 3, 6, 4\]"),
        "channels": (images[:, :1], labels, ValueError, r"images: expected \[B, 3, 6, 6\], got \[4, 1, 6, 6\]"),
        "rank": (images[0], labels, ValueError, r"images: expected \[B, 3, 6, 6\], got \[3, 6, 6\]"),
        "dtype": (images.half(), labels, TypeError, "images: expected torch.float64 or torch.uint8, got torch.float16"),
        "integers": (images.int(), labels, TypeError, "images: expected torch.float64 or torch.uint8, got torch.int32"),
        "not a tensor": (images.numpy(), labels, TypeError, "images: expected a tensor, got ndarray"),
        "scale": (high, labels, ValueError, r"images: expected finite values in \[0, 1\], got .* to 25"),
        "nan": (nan, labels, ValueError, r"images: expected finite values in \[0, 1\], got nan"),
        "inf": (inf, labels, ValueError, r"images: expected finite values in \[0, 1\], got .* to inf"),
        "empty": (images[:0], labels[:0], ValueError, r"images: expected 1 to 20 \(memory_size\) of them, got 0"),
        "too many": (
            random_images(cfg, 21),
            random_labels(cfg, 21),
            ValueError,
            r"images: expected 1 to 20 \(memory_size\) of them, got 21",
        ),
        "label high": (images, labels.clamp(min=5), ValueError, r"labels: expected 0 to 4 \(-1: none\), got 5 to 5"),
        "label negative": (images, labels - 9, ValueError, r"labels: expected 0 to 4 \(-1: none\), got -"),
        "label dtype": (images, labels.double(), TypeError, "labels: expected torch.int64, got torch.float64"),
        "label count": (images, labels[:3], ValueError, r"labels: expected \[4\], one per image, got \[3\]"),
        "label list": (images, labels.tolist(), TypeError, "labels: expected a tensor, got list"),
    }


@pytest.mark.parametrize("case", bad_inputs(small_config()))
def test_bad_input_names_itself_and_changes_nothing(kind, case):
    learner = make(kind)
    run(learner, 7)
    images, labels, error, message = bad_inputs(learner.cfg)[case]
    before = snapshot(learner)
    with pytest.raises(error, match=message):
        learner.observe(images, labels)
    assert equal(before, learner.state_dict())
    run(learner, 8, first=7)


def test_images_without_a_label_train_the_vae_only(kind):
    learner = make(kind)
    initial = copy.deepcopy(learner.model.state_dict())
    for images, _ in stream(learner, 4):
        event = learner.observe(images)
    assert event.loss is not None
    moved = {key for key, value in learner.model.state_dict().items() if not torch.equal(value, initial[key])}
    assert any("vae" in key for key in moved)
    assert all("vae" in key or "running" in key or "tracked" in key for key in moved)


def test_a_label_counts_once_whoever_stands_beside_it(kind):
    """The loss is the mean over labelled images: unlabelled ones only change the batch statistics."""
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, -1, 3, -1, -1, 4])
    kept = labels >= 0
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    torch.testing.assert_close(levit.reference.classification_loss(logits, labels), expected)


def test_callbacks(kind):
    seen = []
    model = kind(small_config(gamma=1e-9)).double()
    learner = levit.Learner(
        model,
        on_batch=lambda learner, event: seen.append(("batch", learner.model.num_experts, event.loss)),
        on_expansion=lambda learner, event: seen.append(("expansion", learner.model.num_experts, len(learner.memory))),
    )
    events = run(learner, 6)
    assert [entry[0] for entry in seen] == ["batch"] * 4 + ["expansion", "batch", "batch"]
    assert seen[4] == ("expansion", 2, 0) and [e[2] for e in seen if e[0] == "batch"] == [e.loss for e in events]


def test_a_failing_callback_leaves_the_learner_whole(kind):
    learner = make(kind)

    def fail(*_):
        raise OSError("disk full")

    learner.on_batch = fail
    with pytest.raises(OSError, match="disk full"):
        run(learner, 1)
    learner.on_batch = None
    run(learner, 6, first=1)
    straight = make(kind)
    run(straight, 6)
    assert equal(learner.state_dict(), straight.state_dict())


def test_uint8_images_are_scaled(kind):
    learner, other = make(kind), make(kind)
    images, labels = random_images(learner.cfg, 4), random_labels(learner.cfg, 4)
    raw = (images * 255).to(torch.uint8)
    learner.observe(raw, labels)
    other.observe(raw.double() / 255, labels)
    assert equal(learner.state_dict(), other.state_dict())


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_a_failure_half_way_marks_the_learner_broken_until_a_state_is_loaded(kind, error, monkeypatch):
    learner, straight = make(kind), make(kind)
    run(learner, 7)
    run(straight, 9)
    saved = snapshot(learner)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(learner.model, "training_loss", fail)
        with pytest.raises(type(error)):
            run(learner, 8, first=7)
    with pytest.raises(RuntimeError, match="an earlier observe failed half-way .*load a saved state first"):
        run(learner, 8, first=7)
    learner.load_state_dict(saved)
    run(learner, 9, first=7)
    assert equal(learner.state_dict(), straight.state_dict())


def test_a_loss_that_is_not_finite_stops_the_learner(kind):
    learner = make(kind)
    with torch.no_grad():
        learner.model.active.head.out.bias.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="loss: expected a finite number, got nan"):
        run(learner, 4)


def corrupt(state, where):
    state = copy.deepcopy(state)
    match where:
        case "no memory":
            del state["memory"]
        case "another model":
            state["model"]["experts.0.embed.weight"] = torch.zeros(3, 3)
        case "missing key":
            del state["model"]["experts.0.qkv.bias"]
        case "extra key":
            state["model"]["experts.0.extra"] = torch.zeros(1)
        case "optimizer":
            state["optimizer"]["param_groups"][0]["params"].pop()
        case "generator":
            state["generator"] = torch.zeros(3, dtype=torch.uint8)
        case "memory row":
            state["memory"]["labels"] = state["memory"]["labels"][:-1]
        case "memory key":
            del state["memory"]["oldest"]
    return state


@pytest.mark.parametrize(
    "where",
    ["no memory", "another model", "missing key", "extra key", "optimizer", "generator", "memory row", "memory key"],
)
def test_a_state_that_does_not_fit_changes_nothing(kind, where):
    learner, other = make(kind, gamma=1e-9), make(kind, gamma=1e-9)
    run(learner, 12)
    run(other, 7)
    state, before = corrupt(snapshot(learner), where), snapshot(other)
    with pytest.raises(ValueError, match="state|memory|experts|optimizer|parameter"):
        other.load_state_dict(state)
    assert equal(other.state_dict(), before)
    other.load_state_dict(snapshot(learner))
    assert equal(other.state_dict(), learner.state_dict())
    run(other, 13, first=12)


def test_bad_updates_per_batch():
    with pytest.raises(ValueError, match="updates_per_batch: expected a whole number of at least 1, got 0"):
        levit.Learner(levit.LEViT(small_config()), updates_per_batch=0)
