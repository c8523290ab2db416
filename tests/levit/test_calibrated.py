"""Rule `calibrated`: scripted surprises through the rule, and small synthetic streams through the learner."""

import math

import numpy as np
import pytest
import torch
from helpers import small_config

import levit
from levit import reference
from levit.calibrated import CalibratedRule, Surprise, label_surprise
from levit.detector import Chart

KINDS = [reference.LEViT, levit.LEViT]


class Scripted:
    """Stands in for a model: surprise k of batch i is `means[k][source of i]` plus noise; images say what i is."""

    num_experts = 1

    def __init__(self, means, labels, seed):
        self.means = means
        self.labels = labels
        self.noise = np.random.default_rng(seed).standard_normal(10_000)

    def surprise(self, images, labels, k):
        batch, source = int(images[0]), int(images[1])
        value = self.means[k][source] + self.noise[batch]
        return Surprise(value, self.noise[-batch - 1] if self.labels else None)


class Watch:
    """Drives a rule over batches as the learner does, and notes what happened when."""

    def __init__(self, means, max_experts=10, labels=True, seed=1):
        self.model = Scripted(means, labels, seed)
        self.rule = CalibratedRule(small_config(criterion="calibrated"))
        self.max_experts = max_experts
        self.batch = 0
        self.log = []
        self.cleared = []

    def see(self, source, count):
        for _ in range(count):
            images = torch.tensor([self.batch, source])
            cleared, change = self.rule.observe(self.model, images, torch.zeros(1, dtype=torch.int64))
            self.cleared += [int(batch[0]) for batch, _ in cleared]
            if change is not None:
                self._react(change)
            self.batch += 1
        return self

    def _react(self, change):
        if change.expert is not None:
            self.rule.recall(change.expert, self.model)
        elif self.model.num_experts < self.max_experts:
            self.model.num_experts += 1
            self.rule.expand()
        else:
            self.rule.ignore()
        self.log.append((self.batch, len(change.batches), change.expert))


class TestRule:
    def test_an_abrupt_change_asks_for_an_expert(self):
        watch = Watch([[0, 9], [9, 0]]).see(0, 100).see(1, 100)
        ((when, late, expert),) = watch.log
        assert 100 <= when < 106 and late == when - 99 and expert is None

    def test_old_data_recall_their_expert_and_then_the_active_one(self):
        watch = Watch([[0, 9, 9], [9, 0, 9], [9, 9, 0]]).see(0, 100).see(1, 100)
        watch.see(0, 60)
        assert watch.log[1][2] == 0 and watch.rule.recalled == 0 and watch.model.num_experts == 2
        watch.see(1, 60)
        assert watch.log[2][2] == 1 and watch.rule.recalled is None
        watch.see(0, 60).see(2, 60)
        assert watch.log[-1][2] is None and watch.model.num_experts == 3 and watch.rule.recalled is None
        watch.see(1, 60)
        assert watch.rule.recalled == 1 and len(watch.log) == 6

    def test_suspect_batches_are_held_back_and_none_is_lost(self):
        watch = Watch([[0, 9], [9, 0]]).see(0, 100).see(1, 100)
        ((when, late, _),) = watch.log
        assert watch.cleared == [*range(when - late + 1), *range(when + 1, 200 - len(watch.rule.suspects))]
        wait = Watch([[0]])
        for seen in range(1, 400):
            wait.see(0, 1)
            assert wait.cleared == list(range(seen - len(wait.rule.suspects)))
            assert len(wait.rule.suspects) == max(len(chart.suspect) for chart in wait.rule.charts)
        assert seen - 10 < len(wait.cleared)

    def test_nearly_always(self):
        watches = [Watch([[0, 9], [9, 0]], seed=seed).see(0, 100).see(1, 100).see(0, 50) for seed in range(40)]
        assert sum(watch.rule.recalled == 0 for watch in watches) >= 38

    def test_of_two_that_know_the_data_the_less_surprised_is_recalled(self):
        watch = Watch([[0, 9, 9], [-2, 0, 9], [9, 9, 0]], labels=False).see(0, 100).see(1, 100).see(2, 100).see(0, 50)
        assert watch.rule.recalled == 1

    def test_without_labels_the_images_alone_decide(self):
        watch = Watch([[0, 9], [9, 0]], labels=False).see(0, 100).see(1, 100).see(0, 50)
        assert [expert for _, _, expert in watch.log] == [None, 0]

    def test_at_the_cap_the_new_data_become_usual(self):
        watch = Watch([[0, 9]], max_experts=1).see(0, 100).see(1, 300)
        assert len(watch.log) == 1

    def test_no_change_no_expert(self):
        assert Watch([[0]]).see(0, 2000).log == []

    def test_an_expert_too_young_to_have_a_usual_is_not_recalled(self):
        watch = Watch([[0, 9, 9], [9, 0, 9], [9, 9, 0]])
        watch.see(0, 100).see(1, 100)
        watch.rule.frozen.append([[0.0] * 3, []])
        watch.model.num_experts = 3
        watch.see(0, 50)
        assert watch.rule.recalled == 0


def stream(cfg, sources, batches, seed=0):
    """Batches of `sources` one after another: each has two classes of its own and a pattern for each of them."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(10, cfg.channels, cfg.image_size, cfg.image_size, generator=torch.Generator().manual_seed(9))
    for source in sources:
        for _ in range(batches):
            labels = 2 * source + torch.randint(2, (cfg.batch_size,), generator=generator)
            images = patterns[labels] + 0.05 * torch.randn(cfg.batch_size, *patterns.shape[1:], generator=generator)
            yield images.clamp(0, 1), labels


def calibrated_config(**overrides):
    return small_config(
        **(dict(criterion="calibrated", num_classes=10, memory_size=60, learning_rate=3e-3) | overrides)
    )


def run(kind, cfg, sources, batches=80, dtype=torch.float32, learner=None):
    learner = learner or levit.Learner(kind(cfg).to(dtype))
    return learner, [learner.observe(images.to(dtype), labels) for images, labels in stream(cfg, sources, batches)]


@pytest.mark.parametrize("kind", KINDS)
class TestLearner:
    def test_finds_the_changes_and_hands_late_images_over(self, kind):
        learner, events = run(kind, calibrated_config(), [0, 1, 2])
        expanded = [i for i, event in enumerate(events) if event.expanded]
        assert len(expanded) == 2 and all(
            0 <= when - change < 8 for when, change in zip(expanded, (80, 160), strict=True)
        )
        for when, change in zip(expanded, (80, 160), strict=True):
            assert events[when].moved == 4 * (when - change)
        assert [event.expert for event in events] == [0] * expanded[0] + [1] * (expanded[1] - expanded[0]) + [2] * (
            240 - expanded[1]
        )
        assert set(learner.memory.labels[learner.memory.live()].tolist()) == {4, 5}

    def test_nobody_learns_from_suspect_batches(self, kind):
        learner, _ = run(kind, calibrated_config(routing="shared", shared_filters=6), [0, 0])
        before = learner.model.num_experts
        for images, labels in stream(learner.cfg, [1], 3):
            learner.observe(images, labels)
        assert learner.model.num_experts == before == 1 and len(learner.rule.suspects) == 3
        assert set(learner.memory.labels[learner.memory.live()].tolist()) <= {0, 1}
        assert learner.model.router.class_counts[0, 2:].sum() == 0

    def test_returning_data_recall_the_frozen_expert_and_train_nobody(self, kind):
        learner, _ = run(kind, calibrated_config(), [0, 1])
        before = {name: value.clone() for name, value in learner.model.state_dict().items()}
        _, events = run(kind, learner.cfg, [0], learner=learner)
        recalled = [i for i, event in enumerate(events) if event.expert == 0]
        assert learner.model.num_experts == 2 and recalled and recalled == list(range(recalled[0], 80))
        assert recalled[0] < 8 and all(events[i].loss is None for i in recalled)
        frozen = {name for name in before if name.startswith("experts.0.")}
        assert all(torch.equal(before[name], learner.model.state_dict()[name]) for name in frozen)
        _, events = run(kind, learner.cfg, [1], learner=learner)
        assert events[-1].expert == 1 and events[-1].loss is not None and learner.model.num_experts == 2

    def test_a_stream_that_stays_the_same_keeps_one_expert(self, kind):
        learner, events = run(kind, calibrated_config(), [0], 150)
        assert learner.model.num_experts == 1 and not any(event.expanded for event in events)

    def test_the_cap_is_kept(self, kind):
        learner, events = run(kind, calibrated_config(max_experts=1), [0, 1, 0])
        assert learner.model.num_experts == 1 and events[-1].loss is not None

    def test_resuming_in_the_middle_of_suspicion_and_of_a_recall_equals_not_stopping(self, kind):
        cfg = calibrated_config(routing="shared", shared_filters=6)
        whole, expected = run(kind, cfg, [0, 1, 0, 1], 60, torch.float64)
        batches = list(stream(cfg, [0, 1, 0, 1], 60))
        for stop in (61, 130, 182):
            first = levit.Learner(kind(cfg).double())
            for images, labels in batches[:stop]:
                first.observe(images.double(), labels)
            second = levit.Learner(kind(cfg).double())
            second.load_state_dict(first.state_dict())
            events = [second.observe(images.double(), labels) for images, labels in batches[stop:]]
            assert [(e.expert, e.loss, e.expanded, e.moved) for e in events] == [
                (e.expert, e.loss, e.expanded, e.moved) for e in expected[stop:]
            ]
        assert {event.expert for event in expected[120:180]} >= {0}
        same = second.model.state_dict()
        assert all(torch.equal(value, same[name]) for name, value in whole.model.state_dict().items())

    @pytest.mark.parametrize("images", ["constant", "one class", "one image", "no label"])
    def test_degenerate_streams_do_no_harm(self, kind, images):
        cfg = calibrated_config(batch_size=1 if images == "one image" else 4)
        learner = levit.Learner(kind(cfg))
        for batch, labels in stream(cfg, [0], 60):
            if images == "constant":
                batch = torch.full_like(batch, 0.5)
            if images == "one class":
                labels = torch.zeros_like(labels)
            event = learner.observe(batch, None if images == "no label" else labels)
        # Batch norm has nothing to normalise in constant images, and predictions mean nothing: labels always surprise.
        assert learner.model.num_experts <= (3 if images == "constant" else 1) and event.loss is not None

    def test_a_state_without_the_rule_is_refused(self, kind):
        learner = levit.Learner(kind(calibrated_config()))
        state = learner.state_dict()
        del state["rule"]
        with pytest.raises(ValueError, match="rule is missing"):
            learner.load_state_dict(state)


def test_reference_and_fused_decide_alike():
    cfg = calibrated_config()
    found = [run(kind, cfg, [0, 1, 0, 2], 60, torch.float64)[1] for kind in KINDS]
    for one, other in zip(*found, strict=True):
        assert (one.expert, one.expanded, one.moved) == (other.expert, other.expanded, other.moved)
        assert one.distances.item() == pytest.approx(other.distances.item())


def test_surprise_is_log_vae_loss_and_cross_entropy():
    cfg = calibrated_config()
    model = levit.LEViT(cfg).double()
    model.add_expert()
    images, labels = next(stream(cfg, [1], 1))
    images, labels[0] = images.double(), -1
    for k in range(2):
        found = model.surprise(images, labels, k)
        assert found.vae == pytest.approx(model.elbo_loss(images)[:, k].log().mean().item())
        logits = model.forward_expert(images, k)[1:]
        expected = -(logits.log_softmax(1).gather(1, labels[1:, None])).mean().item()
        assert found.label == pytest.approx(expected)
    assert model.surprise(images, torch.full_like(labels, -1), 0).label is None


def logits_for(cross_entropies):
    """Two classes; class 0 has these cross-entropies."""
    wrong = -np.expm1(-np.asarray(cross_entropies))
    return torch.tensor(np.stack([np.log1p(-wrong), np.log(wrong)], axis=1))


def test_labels_that_are_all_right_surprise_nobody():
    random = np.random.RandomState(0)
    for count in (1, 3, 10):
        labels = torch.zeros(count, dtype=torch.int64)
        for scale in (1e-6, 1e-3, 0.1, 1.0, 5.0):
            losses = scale * random.exponential(size=count)
            found = label_surprise(logits_for(losses), labels)
            assert found == pytest.approx(max(losses.mean(), math.log(2) / count))
            if losses.max() > math.log(2):  # a label is wrong
                assert found == pytest.approx(losses.mean())
    assert math.isnan(label_surprise(torch.full((2, 2), torch.nan), torch.zeros(2, dtype=torch.int64)))


def test_a_cross_entropy_that_creeps_far_below_a_wrong_label_raises_no_alarm():
    random, labels = np.random.RandomState(0), torch.zeros(10, dtype=torch.int64)
    losses = [1e-5 * 1.15 ** max(0, i - 60) * random.exponential(size=10) for i in range(110)]
    naive, chart = Chart(6.0), Chart(6.0)
    assert any(naive.observe(batch.mean()) for batch in losses), "ranks alone see a change"
    assert not any(chart.observe(label_surprise(logits_for(batch), labels)) for batch in losses)
    wrong = [label_surprise(logits_for(5 + random.exponential(size=10)), labels) for _ in range(5)]
    assert [chart.observe(value) for value in wrong] == [False] * 4 + [True]
