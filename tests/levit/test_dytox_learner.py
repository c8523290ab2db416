"""DyToxLearner: what a step is, what stays frozen, that joint and separate training agree, and resuming."""

import copy

import pytest
import torch
import torch.nn.functional as F
from dytox_helpers import build, random_images, small, task

import levit
from levit.dytox.learner import DyToxLearner


def make(dtype=torch.float64, **overrides):
    return DyToxLearner(levit.DyTox(small(**overrides)).to(dtype))


def finish(learner):
    losses = []
    while (loss := learner.step()) is not None:
        losses.append(loss)
    return losses


def learn(learner, tasks=((0, 3), (3, 2)), **options):
    for i, (old, new) in enumerate(tasks):
        learner.begin_task(*task(old, new, seed=i, **options), new)
        finish(learner)
    return learner


def state_of(module):
    return copy.deepcopy(module.state_dict())


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


class TestStep:
    def test_of_the_first_task_is_adamw_on_the_cross_entropy(self):
        learner = make(augment=False, batch_size=50, warmup_epochs=0)
        images, labels = task(0, 3)
        learner.begin_task(images, labels, 3)
        twin = copy.deepcopy(learner.model)
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=1e-6)
        loss = F.binary_cross_entropy_with_logits(twin(images.double() / 255), F.one_hot(labels, 3).double())
        loss.backward()
        optimizer.step()
        assert learner.step() == pytest.approx(loss.item(), rel=1e-12)
        got, idle = learner.model.state_dict(), ("pos_proj.bias",)  # under softmax: Adam follows rounding
        for key, value in twin.state_dict().items():
            if not key.endswith(idle):
                torch.testing.assert_close(got[key], value, rtol=1e-7, atol=1e-9, msg=key)

    def test_of_a_later_task_adds_distillation_and_divergence(self):
        learner = learn(make(augment=False, batch_size=50, warmup_epochs=0), tasks=((0, 3),))
        teacher = copy.deepcopy(learner.model)
        images, labels = task(3, 2, seed=1)
        learner.begin_task(images, labels, 2)
        stored, stored_labels = learner.memory.all()
        assert len(stored) == 12  # 20 over 3 classes, and there were no more than 12
        images, labels = torch.cat([stored, images]).double() / 255, torch.cat([stored_labels, labels])
        new, divergence = learner.model.training_outputs(images)
        old = teacher(images)
        targets = F.one_hot(labels, 5).double()
        p = torch.softmax(old, 1)
        distillation = (p * (p.log() - torch.log_softmax(new[:, :3], 1))).sum() / old.numel()
        classes = torch.where(labels < 3, 0, labels - 2)
        want = 0.4 * F.binary_cross_entropy_with_logits(new, targets) + 0.6 * distillation
        want = want + 0.1 * F.binary_cross_entropy_with_logits(divergence, F.one_hot(classes, 3).double())
        assert learner.step() == pytest.approx(want.item(), rel=1e-10)

    def test_the_learning_rate_rises_and_falls(self):
        learner = make(epochs=10, warmup_epochs=2, batch_size=4)
        learner.begin_task(*task(0, 3), 3)
        rates = []
        for done in range(learner.total):
            learner.done = done
            rates.append(learner.learning_rate())
        assert len(rates) == 30 and rates[:6] == pytest.approx([1e-2 * i / 6 for i in range(1, 7)])
        assert rates[6] == pytest.approx(1e-2) and rates[18] == pytest.approx(5e-3) and rates[29] < 1e-3
        assert sorted(rates[6:], reverse=True) == rates[6:]

    def test_every_epoch_shows_every_image_once(self):
        learner = make(augment=False, batch_size=5)
        images, labels = task(0, 3)
        learner.begin_task(images, labels, 3)
        for epoch in (0, 1):
            shown = []
            for _ in range(3):
                shown.append(learner._batch()[0])
                learner.step()
            rows = (torch.cat(shown)[:, None] * 255 - images[None].double()).abs().amax((2, 3, 4)).argmin(1)
            assert sorted(rows.tolist()) == list(range(12)), epoch

    def test_a_diverged_loss_stops(self):
        learner = make()
        learner.begin_task(*task(0, 3), 3)
        with torch.no_grad():
            learner.model.pos_embed.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="the loss is nan in step 0 of phase train"):
            learner.step()

    @pytest.mark.parametrize("options", [dict(mixup=0.8), dict(rehearsal="random"), dict(attention="mhsa")], ids=str)
    def test_options_run_through_all_phases(self, options):
        learner = learn(make(torch.float32, **options))
        assert learner.phase is None and learner.step() is None
        assert len(learner.memory) <= 20 and max(len(x) for x in learner.memory.classes) == 4

    def test_learns(self):
        learner = make(torch.float32, epochs=10, augment=False)
        images, labels = task(0, 3, count=24)
        images = (images // 4) + (80 * labels.to(torch.uint8))[:, None, None, None]  # each class of its own brightness
        learner.begin_task(images, labels, 3)
        losses = finish(learner)
        assert losses[-1] < losses[0] / 3
        assert (learner.model(images).argmax(1) == labels).float().mean() > 0.9


class TestFrozen:
    OLD = ("task_tokens.0", "head.0.")
    ENCODER = ("patch_embed.", "pos_embed", "sabs.")

    def moved(self, learner, steps):
        before = state_of(learner.model)
        for _ in range(steps):
            learner.step()
        return {key for key, value in learner.model.state_dict().items() if not torch.equal(value, before[key])}

    def test_old_tokens_and_heads_stay_bit_for_bit_while_a_task_is_trained(self):
        learner = learn(make(), tasks=((0, 3),))
        learner.begin_task(*task(3, 2, seed=1), 2)
        keys = set(learner.model.state_dict())
        moved = self.moved(learner, learner.total)
        assert learner.phase == "train" and keys - moved == {key for key in keys if key.startswith(self.OLD)}

    def test_the_encoder_stays_bit_for_bit_while_the_model_is_fine_tuned(self):
        learner = learn(make(), tasks=((0, 3),))
        learner.begin_task(*task(3, 2, seed=1), 2)
        while learner.phase == "train":
            learner.step()
        assert learner.phase == "finetune" and learner.done == 1  # the step that ended the training was its first
        keys = set(learner.model.state_dict())
        moved = self.moved(learner, learner.total - 1)
        still = {key for key in keys if key.startswith(self.ENCODER) or key.startswith("head_div.")}
        assert keys - moved == still

    def test_fine_tuning_is_balanced_and_starts_with_the_second_task(self):
        learner = learn(make(), tasks=((0, 3),))
        learner.begin_task(*task(3, 2, count=40, seed=1), 2)
        while learner.phase == "train":
            learner.step()
        assert torch.bincount(learner.labels).max() == 4 and len(learner.images) <= 20
        assert learner.learning_rate() == 1e-2

    def test_without_freezing_all_of_it_moves(self):
        learner = learn(make(freeze_old=False, finetune_epochs=0, memory_size=0, divergence=0.0, distillation=False))
        assert len(learner.memory) == 0 and learner.teacher is None
        learner.begin_task(*task(5, 2, seed=2), 2)
        assert len(learner.images) == 12
        assert self.moved(learner, learner.total) == set(learner.model.state_dict())


def test_joint_and_separate_training_agree():
    """50 steps over two tasks in float64, every phase included."""
    trained = []
    for joint in (True, False):
        learner = make(joint=joint, epochs=8, finetune_epochs=4, warmup_epochs=2)
        losses = []
        for old, new in ((0, 3), (3, 2)):
            learner.begin_task(*task(old, new, seed=old), new)
            losses += finish(learner)
        assert len(losses) >= 50
        trained.append((torch.tensor(losses), learner.model.state_dict()))
    (first, one), (second, other) = trained
    assert (first - second).abs().max() <= 1e-9
    for key, value in one.items():
        assert (value - other[key]).abs().max() <= 1e-9, key


@pytest.mark.parametrize("phase", ["train", "finetune"])
def test_stopping_within_a_task_leaves_no_trace(phase):
    first = learn(make(), tasks=((0, 3),))
    images, labels = task(3, 2, seed=1)
    first.begin_task(images, labels, 2)
    while first.phase != phase or first.done < 1:
        first.step()
    state = copy.deepcopy(first.state_dict())
    second = make()
    with pytest.raises(ValueError, match="from within a task; pass that task's images and labels"):
        second.load_state_dict(state)
    second.load_state_dict(state, images, labels)
    assert finish(first) == finish(second)
    for learner in (first, second):
        learner.begin_task(*task(5, 2, seed=2), 2)
        finish(learner)
    assert equal(first.state_dict(), second.state_dict())


def test_stopping_between_tasks_leaves_no_trace():
    first, second = learn(make(), tasks=((0, 3),)), make()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for learner in (first, second):
        learn(learner, tasks=((3, 2),))
    assert equal(first.state_dict(), second.state_dict())


class TestInput:
    @pytest.mark.parametrize(
        ("change", "error", "said"),
        [
            (lambda x, y, n: (x, y, 0), ValueError, "num_classes: expected a whole number of at least 1, got 0"),
            (lambda x, y, n: (x, y + 1, n), ValueError, "labels: expected 3 to 4, the task's own, got 4 to 5"),
            (lambda x, y, n: (x, y - 1, n), ValueError, "labels: class 2 belongs to an earlier task"),
            (lambda x, y, n: (x, y - 9, n), ValueError, "labels: expected 3 to 4, the task's own, got -6 to -5"),
            (lambda x, y, n: (x, y.int(), n), TypeError, "labels: expected torch.int64, got torch.int32"),
            (lambda x, y, n: (x, y[:-1], n), ValueError, r"labels: expected \[12\], .*, got \[11\]"),
            (lambda x, y, n: (x[:0], y[:0], n), ValueError, "labels: expected .* at least one, got"),
            (lambda x, y, n: (x[:, :1], y, n), ValueError, r"images: expected \[B, 3, 8, 8\]"),
            (lambda x, y, n: (x.double(), y, n), ValueError, r"images: expected \[0, 1\], got 0 to 255"),
            (lambda x, y, n: (x.float() / 255, y, n), TypeError, "images: expected torch.float64 or torch.uint8"),
        ],
        ids="no-classes beyond-the-heads overlapping negative label-dtype lengths empty channels range dtype".split(),
    )
    def test_a_wrong_task_changes_nothing(self, change, error, said):
        learner = learn(make(), tasks=((0, 3),))
        before = copy.deepcopy(learner.state_dict())
        with pytest.raises(error, match=said):
            learner.begin_task(*change(*task(3, 2), 2))
        assert equal(before, learner.state_dict())
        learn(learner, tasks=((3, 2),))

    def test_one_task_at_a_time(self):
        learner = make()
        learner.begin_task(*task(0, 3), 3)
        with pytest.raises(RuntimeError, match="the task before is not done"):
            learner.begin_task(*task(3, 2), 2)

    def test_a_model_with_a_task_goes_on(self):
        """As one of a public checkpoint does: without memory, but with its teacher."""
        learner = DyToxLearner(build((3,)))
        learner.begin_task(*task(3, 2), 2)
        assert learner.teacher.classes_per_task == [3] and len(learner.images) == 12
        finish(learner)
        assert learner.model(random_images(2)).shape == (2, 5)
