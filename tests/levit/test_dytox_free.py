"""Task-free DyTox: the changes of made-up streams are found, classes get outputs, and resuming leaves no trace."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from dytox_helpers import batches, images_of, small
from test_dytox_run import same

from levit.detection import score
from levit.detector import WARM_UP, limit_for
from levit.dytox.config import DyToxConfig
from levit.dytox.free import FreeDyToxLearner
from levit.dytox.free_model import FreeDyTox
from levit.dytox.rehearsal import Reservoir

BATCH = 8


def make(dtype=torch.float32, **overrides):
    fields = dict(num_classes=8, first_classes=2, embed_dim=16, depth=1, augment=False)
    fields |= dict(stream_batch=BATCH, batch_size=32, memory_size=60, learning_rate=1e-2)
    return FreeDyToxLearner(FreeDyTox(small(**(fields | overrides))).to(dtype))


def watch(learner, stream):
    """-> batches before each expansion, the expanding one included, and all events."""
    events = [learner.observe(images, labels) for images, labels in stream]
    return [at for at, event in enumerate(events, 1) if event.expanded], events


def accuracy(model, labels):
    images, true = next(batches(labels, 1, seed=99, size=40))
    return (model(images).argmax(1) == true).float().mean().item()


class TestStream:
    def test_changes_are_found_and_nothing_else(self):
        learner = make()
        groups = [(5, 1), (0, 7), (2, 3)]
        stream = [batch for i, group in enumerate(groups) for batch in batches(group, 45, seed=i)]
        found, events = watch(learner, stream)
        detection = score(found, [45, 90])
        assert detection.misses == detection.false_alarms == 0 and max(detection.delays) <= 6
        assert learner.model.classes_per_task == [2, 2, 2]
        assert [sorted(part) for part in learner.model.labels.view(3, 2).tolist()] == [[1, 5], [0, 7], [2, 3]]
        assert [events[at - 1].moved for at in found] == [BATCH * (delay - 1) for delay in detection.delays]
        assert [event.expert for event in events] == [sum(at <= i for at in found) for i in range(1, 136)]
        assert learner.teacher.labels.tolist() == learner.model.labels[:4].tolist()

    def test_old_classes_are_not_forgotten(self):
        learner = make(updates_per_batch=3, distillation=False)
        watch(learner, [*batches((5, 1), 35), *batches((0, 7), 35, seed=1)])
        assert learner.model.num_tasks == 2
        assert accuracy(learner.model, (5, 1)) > 0.9 and accuracy(learner.model, (0, 7)) > 0.9

    def test_a_stream_without_a_change_keeps_one_token(self):
        learner = make()
        found, _ = watch(learner, batches(range(6), 70))
        assert not found and learner.model.num_tasks == 1 and learner.model.classes_per_task == [6]

    def test_one_class_at_a_time(self):
        """A new class stays one in every batch, so it is another source: a token of its own."""
        learner = make()
        found, _ = watch(learner, [*batches((0, 1), 40), *batches((0, 1, 4), 40, seed=1)])
        assert len(found) == 1 and learner.model.classes_per_task == [2, 1] and learner.model.labels[-1] == 4

    def test_a_rare_class_joins_the_latest_token(self):
        learner = make()
        watch(learner, batches((0, 1), WARM_UP + 5))
        images, labels = next(batches((0, 1), 1, seed=1))
        images[3], labels[3] = images_of(torch.tensor([6]), torch.Generator())[0], 6
        assert learner.surprise(images, labels) == math.inf
        learner.observe(images, labels)
        assert learner.model.columns(torch.tensor([6])) == -1 and len(learner.waiting) == 1  # not learned while suspect
        found, _ = watch(learner, batches((0, 1), 4, seed=2))
        assert not found and learner.model.classes_per_task == [3] and not learner.waiting
        assert learner.memory.came[2] == 1

    def test_an_alarm_without_new_classes_adds_nothing(self):
        """The labels of two classes change places."""
        learner = make(updates_per_batch=4)
        watch(learner, batches((0, 1), 45))
        swapped = [(images, 1 - labels) for images, labels in batches((0, 1), 10, seed=1)]
        before = len(learner.chart.window)
        found, events = watch(learner, swapped)
        assert not found and learner.model.num_tasks == 1
        assert max(event.distances.item() for event in events) > learner.chart.limit
        assert len(learner.chart.window) < before  # what is usual is judged anew

    def test_the_limit_belongs_to_one_chart(self):
        assert make(false_alarms_every=50_000).chart.limit == pytest.approx(limit_for(50_000 / BATCH))


class TestUpdate:
    def test_of_the_first_batch_is_adamw_on_the_cross_entropy(self):
        learner = make(torch.float64, memory_size=0, learning_rate=1e-3)
        images, labels = next(batches((6, 3), 1))
        images = images.double()
        twin = FreeDyTox(learner.cfg).double()
        order = list(dict.fromkeys(labels.tolist()))
        twin.learn_labels(order, new_token=True)
        targets = torch.stack([(labels == label).double() for label in order], 1)
        loss = F.binary_cross_entropy_with_logits(twin.training_outputs(images)[0], targets)
        assert learner.observe(images, labels).loss == pytest.approx(loss.item(), rel=1e-12)
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=learner.cfg.weight_decay)
        loss.backward()
        optimizer.step()
        for (key, got), want in zip(learner.model.named_parameters(), twin.parameters(), strict=True):
            if not key.endswith("pos_proj.bias"):  # under softmax: Adam follows rounding
                torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9, msg=key)

    def test_every_batch_is_filled_from_the_memory_in_equal_parts(self):
        learner = make(batch_size=400)
        watch(learner, [*batches((5, 1), 40), *batches((0, 7), 10, seed=1)])
        images, columns = learner.memory.all()
        _, targets = learner._batch(images[:0], columns[:0], 0)
        assert targets.shape == (400, 4) and (targets.sum(0) - 100).abs().max() < 45  # five deviations

    def test_of_old_tokens_and_heads_only_where_they_may(self):
        for freeze in (True, False):
            learner = make(freeze_old=freeze)
            watch(learner, [*batches((5, 1), 40), *batches((0, 7), 8, seed=1)])
            before = learner.model.task_tokens[0].clone(), learner.model.head[0].head.weight.clone()
            watch(learner, batches((0, 7), 2, seed=2))
            after = learner.model.task_tokens[0], learner.model.head[0].head.weight
            assert learner.model.num_tasks == 2
            assert all(torch.equal(*pair) is freeze for pair in zip(before, after, strict=True))


class TestModel:
    def test_labels_that_never_came_have_no_probability(self):
        learner = make()
        watch(learner, batches((5, 2), 3))
        images, labels = next(batches((5, 2), 1, seed=1))
        logits = learner.model(images)
        assert torch.isinf(logits[:, [0, 1, 3, 4, 6, 7]]).all() and logits[:, [2, 5]].isfinite().all()
        columns, _ = learner.model.training_outputs(images)
        torch.testing.assert_close(logits[:, learner.model.labels], columns)
        assert learner.model.probabilities(images)[:, 0].eq(0).all()
        assert learner.surprise(images, labels) == pytest.approx(
            F.cross_entropy(logits[:, [5, 2]], (labels == 2).long()).item()
        )

    def test_a_head_grows_behind_what_it_has(self):
        model = FreeDyTox(small(num_classes=8, first_classes=2))
        model.learn_labels([4, 2], new_token=True)
        model.learn_labels([7], new_token=True)
        images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        (before, divergence), token = model.training_outputs(images), model.task_tokens[1].clone()
        model.learn_labels([0, 1], new_token=False)
        after, grown = model.training_outputs(images)
        assert model.classes_per_task == [2, 3] and torch.equal(model.task_tokens[1], token)
        torch.testing.assert_close(after[:, :3], before, rtol=0, atol=1e-6)
        torch.testing.assert_close(grown[:, :2], divergence, rtol=0, atol=1e-6)
        assert grown.shape == (3, 4) and model.route(images).max() <= 1
        assert model.columns(torch.tensor([1, 3, 4])).tolist() == [4, -1, 0]

    def test_states_carry_the_labels(self):
        model, other = (FreeDyTox(small(num_classes=8, first_classes=2)) for _ in range(2))
        model.learn_labels([4, 2, 6], new_token=True)
        other.load_state_dict(model.state_dict())
        images = torch.rand(3, 3, 8, 8)
        assert torch.equal(other(images), model(images)) and other.predict(images).label.max() <= 6
        state = model.state_dict()
        del state["labels"]
        with pytest.raises(ValueError, match=r"state_dict: labels: expected \[3\], .*, got none"):
            other.load_state_dict(state)


class TestMemory:
    def test_holds_a_fair_share_of_each_class(self):
        memory, generator = Reservoir(30), torch.Generator().manual_seed(0)
        for start in range(0, 200, 10):
            images = torch.arange(start, start + 10.0).view(10, 1, 1, 1)
            memory.offer(images, torch.full((10,), start // 100), generator)
        assert memory.came == [100, 100] and [len(own) for own in memory.classes] == [15, 15]
        kept = torch.cat(memory.classes).flatten()
        assert (kept[:15] < 100).all() and (kept[15:] >= 100).all() and len(kept.unique()) == 30
        images, labels = memory.draw(400, generator)
        assert torch.equal(labels, (images.flatten() >= 100).long()) and 150 < labels.sum() < 250

    def test_every_image_is_as_likely(self):
        counts = torch.zeros(20)
        for seed in range(400):
            memory, generator = Reservoir(5), torch.Generator().manual_seed(seed)
            for i in range(0, 20, 4):
                memory.offer(torch.arange(i, i + 4.0).view(4, 1, 1, 1), torch.zeros(4, dtype=torch.int64), generator)
            counts[memory.classes[0].flatten().long()] += 1
        assert (counts - 100).abs().max() < 45  # five deviations

    def test_of_no_capacity(self):
        learner = make(memory_size=0)
        _, events = watch(learner, batches((0, 1), 2))
        assert len(learner.memory) == 0 and all(event.loss is not None for event in events)


class TestResuming:
    @pytest.mark.parametrize("at", [2, 40, 43, 60], ids=["warm-up", "before", "suspicion", "after"])
    def test_stopping_leaves_no_trace(self, at):
        stream = [*batches((5, 1), 40), *batches((0, 7), 25, seed=1)]
        first, second = make(augment=True), make(augment=True)
        watch(first, stream[:at])
        if at == 43:
            assert first.waiting and first.suspects == [BATCH] * 3
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        (found, events), (again, others) = watch(first, stream[at:]), watch(second, stream[at:])
        assert found == again and [e.loss for e in events] == [e.loss for e in others]
        assert same(first.state_dict(), second.state_dict())


class TestInput:
    @pytest.mark.parametrize(
        ("change", "error", "said"),
        [
            (lambda x, y: (x, y + 4), ValueError, "labels: expected 0 to 7, got 4 to 8"),
            (lambda x, y: (x, y - 1), ValueError, "labels: expected 0 to 7, got -1 to 3"),
            (lambda x, y: (x, y.int()), TypeError, "labels: expected torch.int64, got torch.int32"),
            (lambda x, y: (x, y[:-1]), ValueError, r"labels: expected \[8\], one per image, got \[7\]"),
            (lambda x, y: (x[:0], y[:0]), ValueError, "images: expected at least one, got none"),
            (lambda x, y: (x[:, :1], y), ValueError, r"images: expected \[B, 3, 8, 8\]"),
            (lambda x, y: (x * math.nan, y), ValueError, "images: expected finite values in"),
        ],
        ids="beyond negative dtype lengths empty channels nan".split(),
    )
    def test_a_wrong_batch_changes_nothing(self, change, error, said):
        learner = make()
        images, labels = images_of(torch.tensor([0, 4] * 4), torch.Generator()), torch.tensor([0, 4] * 4)
        learner.observe(images, labels)
        before = copy.deepcopy(learner.state_dict())
        with pytest.raises(error, match=said):
            learner.observe(*change(images, labels))
        assert same(before, learner.state_dict())

    def test_settings(self):
        with pytest.raises(ValueError, match="false_alarms_every: expected at least 100 stream batches, got 999"):
            DyToxConfig(false_alarms_every=999)
