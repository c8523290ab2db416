"""Streams: every scenario's order, what is hidden from the learner, and what the evaluator may know."""

import dataclasses

import numpy as np
import pytest
import torch
from stream_helpers import dataset, keras_arrays, write_npz

from levit.config import LEViTConfig
from levit.streams import Stream, configured_dataset, load_dataset, scenarios

SCENARIOS = ("split", "drifting", "shuffled", "permuted")


def concatenated(stream, start=0):
    images, labels = zip(*stream.batches(start), strict=True)
    return torch.cat(images), torch.cat(labels)


def tiny(scenario="split", seed=0, data=None, batch_size=10, **options):
    """A stream over a data set whose image i has value i in every pixel."""
    data = data or dataset()
    plan = getattr(scenarios, scenario)(data, np.random.RandomState(seed), **options)
    return Stream(data, plan, batch_size=batch_size)


class TestStream:
    def test_a_batch_may_straddle_a_change_and_carries_images_and_labels_alone(self):
        batches = list(tiny(batch_size=3))
        assert all(len(batch) == 2 and all(type(part) is torch.Tensor for part in batch) for batch in batches)
        assert [len(labels) for _, labels in batches] == [3] * 6 + [2]
        assert {int(label) // 2 for label in batches[3][1]} == {0, 1}

    @pytest.mark.parametrize("scenario", SCENARIOS[:3])
    def test_images_belong_to_their_labels_and_rows(self, scenario):
        data = dataset()
        stream = tiny(scenario, data=data, batch_size=4, seed=2)
        images, labels = concatenated(stream)
        assert (images[:, 0, 0, 0] * 255).round().int().tolist() == stream.plan.rows.tolist()
        assert labels.tolist() == data.train_labels[stream.plan.rows].tolist() and labels.dtype == torch.int64
        assert images.dtype == torch.float32 and images.max() <= 1

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_starting_anywhere_gives_the_rest(self, scenario):
        stream = tiny(scenario, batch_size=4, seed=2)
        whole, rest = concatenated(stream), concatenated(stream, start=8)
        assert torch.equal(whole[0][8:], rest[0]) and torch.equal(whole[1][8:], rest[1])
        assert list(stream.batches(start=len(stream))) == []

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_the_seed_decides_the_order(self, scenario):
        checksums = [tiny(scenario, seed=seed).checksum() for seed in (0, 0, 1)]
        assert checksums[0] == checksums[1] != checksums[2]

    def test_the_record_says_what_came(self):
        stream = tiny("permuted", permutations=3)
        record = stream.record()
        data, images = stream.data, concatenated(stream)[0]
        for i in range(0, len(stream), 7):
            order = record["permutations"][record["experience"][i]]
            shown = data.train_images[record["index"][i], 0].ravel()[order].reshape(2, 2)
            assert (images[i, 0] * 255).round().int().tolist() == shown.tolist()
        assert record["label"].tolist() == record["class"].tolist() == data.train_labels[record["index"]].tolist()
        assert record["class_original_label"].tolist() == ["0", "1", "2", "3"]


class TestSplit:
    def test_experiences_follow_each_other_and_cover_every_image_once(self):
        stream = tiny(classes_per_task=2, batch_size=3, seed=7)
        _, labels = concatenated(stream)
        assert set(labels[:10].tolist()) == {0, 1} and set(labels[10:].tolist()) == {2, 3}
        assert sorted(stream.plan.rows) == list(range(20))
        assert stream.ends == [10, 20] and stream.change_points == [10] and stream.experiences == [(0, 1), (2, 3)]

    def test_class_order(self):
        stream = tiny(class_order=[3, 0, 1, 2])
        assert stream.experiences == [(3, 0), (1, 2)] and stream.plan.class_order == [3, 0, 1, 2]
        shuffled = [tiny(class_order="shuffled", seed=seed).plan.class_order for seed in range(5)]
        assert all(sorted(order) == [0, 1, 2, 3] for order in shuffled) and len(set(map(tuple, shuffled))) > 1
        for wrong in ("random", [0, 1, 2], [0, 1, 2, 2]):
            with pytest.raises(ValueError, match="class_order: expected natural, shuffled or"):
                tiny(class_order=wrong)

    def test_test_images_belong_where_their_class_does(self):
        stream = tiny(class_order=[3, 0, 1, 2])
        test = stream.test
        assert test.experience.tolist() == [0 if label in (3, 0) else 1 for label in test.labels.tolist()]
        assert test.labels.tolist() == test.kinds.tolist() == stream.data.test_labels.tolist()
        part = test.of_experience(1)
        assert set(part.labels.tolist()) == {1, 2} and len(part) == 4
        rows = (part.images[:][:, 0, 0, 0] * 255).round().int().tolist()
        assert part.labels.tolist() == stream.data.test_labels[rows].tolist()

    @pytest.mark.parametrize(
        ("train", "limit", "sizes"),
        [
            ((5, 5, 5, 5), 10, [5, 5]),
            ((30, 30, 10, 10), 8, [6, 2]),
            ((30, 30, 10, 10), 5, [4, 1]),  # 3.75 and 1.25
            ((90, 8, 1, 1), 10, [9, 1]),  # 9.8 and 0.2
            ((90, 90, 1, 1), 2, [1, 1]),  # no experience vanishes
            ((5, 5, 5, 5), 99, [10, 10]),
        ],
    )
    def test_limit_keeps_proportions(self, train, limit, sizes):
        stream = tiny(data=dataset(train=train, test=(1, 1, 1, 1)), limit=limit)
        assert np.diff([0, *stream.ends]).tolist() == sizes and len(stream) == sum(sizes)
        assert len(set(stream.plan.rows)) == len(stream)

    def test_limit_below_one_image_per_experience(self):
        with pytest.raises(ValueError, match="limit: expected at least 2 images, one per experience, got 1"):
            tiny(limit=1)

    def test_classes_that_cannot_be_split(self):
        with pytest.raises(ValueError, match="classes_per_task: expected a divisor of 4 classes, got 3"):
            tiny(classes_per_task=3)


class TestDrifting:
    DATA = dict(train=(3000,) * 6, test=(1,) * 6)

    def test_shares_cross_linearly_at_each_border(self):
        """At t experiences from a border, |t| ≤ drift / 2, the new classes' share is ½ + t / drift."""
        data = dataset(**self.DATA)
        for drift in (0.5, 1.0):
            experience = tiny("drifting", data=data, drift=drift).plan.experience
            size = 6000
            for border in (1, 2):
                for t in (-0.8, -0.4, 0, 0.4, 0.8):
                    middle = int((border + t * drift / 2) * size)
                    share = (experience[middle - 150 : middle + 150] == border).mean()
                    assert share == pytest.approx(0.5 + t / 2, abs=0.09)

    def test_every_image_comes_once_and_experiences_end_in_the_middle_of_a_change(self):
        stream = tiny("drifting", data=dataset(**self.DATA))
        assert sorted(stream.plan.rows) == list(range(18000)) and stream.ends == [6000, 12000, 18000]
        assert set(stream.plan.experience[:2000]) == {0} and set(stream.plan.experience[-2000:]) == {2}
        assert (stream.labels // 2 == stream.plan.experience).all()

    def test_without_drift_is_a_split(self):
        stream = tiny("drifting", drift=0.0)
        assert (np.diff(stream.plan.experience) >= 0).all() and stream.ends == [10, 20]

    def test_limit(self):
        stream = tiny("drifting", data=dataset(**self.DATA), limit=90)
        assert stream.ends == [30, 60, 90] and len(np.unique(stream.plan.rows)) == 90


class TestPermuted:
    def test_first_as_they_are_then_under_one_permutation_each(self):
        random = np.random.RandomState(3)
        data = dataclasses.replace(
            dataset(train=(4, 4), test=(2, 2), size=3),
            train_images=random.randint(0, 256, (8, 3, 3, 3)).astype(np.uint8),
            test_images=random.randint(0, 256, (4, 3, 3, 3)).astype(np.uint8),
        )
        stream = tiny("permuted", data=data, permutations=3, batch_size=5)
        images, labels = concatenated(stream)
        images = (images * 255).round().byte().numpy()
        assert stream.ends == [8, 16, 24] and stream.experiences == [(0, 1)] * 3
        orders = stream.plan.permutations
        assert orders[0].tolist() == list(range(9)) and all(sorted(order) == list(range(9)) for order in orders)
        assert len({tuple(order) for order in orders}) == 3
        for i, row in enumerate(stream.plan.rows):
            for channel in range(3):
                expected = [data.train_images[row, channel].ravel()[p] for p in orders[i // 8]]
                assert images[i, channel].ravel().tolist() == expected
        assert labels.tolist() == data.train_labels[stream.plan.rows].tolist()
        for start in (0, 8, 16):
            assert sorted(stream.plan.rows[start : start + 8]) == list(range(8))

    def test_the_whole_test_set_under_every_permutation(self):
        random = np.random.RandomState(3)
        data = dataclasses.replace(dataset(), test_images=random.randint(0, 256, (8, 1, 2, 2)).astype(np.uint8))
        test = tiny("permuted", data=data, permutations=2).test
        order = tiny("permuted", data=data, permutations=2).plan.permutations[1]
        assert len(test) == 16 and test.experience.tolist() == [0] * 8 + [1] * 8
        assert test.labels.tolist() == data.test_labels.tolist() * 2
        assert test.kinds.tolist() == [*data.test_labels.tolist(), *(data.test_labels + 4).tolist()]
        shown = (test.images[8:] * 255).round().byte().numpy().reshape(8, 4)
        assert (shown == data.test_images.reshape(8, 4)[:, order]).all()
        assert torch.equal(test.of_experience(1).images[2:5], test.images[10:13])

    def test_limit_is_shared(self):
        assert tiny("permuted", permutations=4, limit=22).ends in ([6, 12, 17, 22], [5, 10, 16, 22], [6, 11, 16, 22])

    def test_what_an_expert_can_have_seen_is_a_class_under_a_permutation(self):
        stream = tiny("permuted", permutations=2)
        assert stream.num_kinds == 8
        assert (stream.kinds == stream.labels + 4 * stream.plan.experience).all()


class TestShuffled:
    def test_one_experience_of_everything(self):
        stream = tiny("shuffled", data=dataset(train=(50,) * 4))
        assert stream.ends == [200] and stream.experiences == [(0, 1, 2, 3)]
        assert sorted(stream.plan.rows) == list(range(200)) and len(set(stream.labels[:20].tolist())) == 4
        assert set(stream.test.experience.tolist()) == {0}
        assert len(tiny("shuffled", limit=7)) == 7


class TestJoined:
    @pytest.fixture
    def cfg(self, tmp_path):
        write_npz(tmp_path, "a", **keras_arrays(size=4, classes=4))
        write_npz(tmp_path, "b", **keras_arrays(size=4, classes=4, seed=1))
        return LEViTConfig(scenario="joined", dataset="a+b", image_size=4, patch_size=2, num_classes=8)

    def test_one_data_set_after_the_other(self, cfg, tmp_path):
        stream = Stream.from_config(cfg, configured_dataset(cfg, tmp_path))
        assert stream.experiences == [(0, 1), (2, 3), (4, 5), (6, 7)] and stream.ends == [12, 24, 36, 48]
        assert stream.labels.max() == 7 and (stream.labels == stream.classes).all()

    def test_classes_are_shuffled_within_each(self, cfg, tmp_path):
        cfg = dataclasses.replace(cfg, class_order="shuffled", seed=5)
        order = Stream.from_config(cfg, configured_dataset(cfg, tmp_path)).plan.class_order
        assert sorted(order[:4]) == [0, 1, 2, 3] and sorted(order[4:]) == [4, 5, 6, 7] and order != list(range(8))

    def test_shared_labels(self, cfg, tmp_path):
        cfg = dataclasses.replace(cfg, shared_labels=True, num_classes=4)
        stream = Stream.from_config(cfg, configured_dataset(cfg, tmp_path))
        assert (stream.labels == stream.classes % 4).all() and (stream.test.labels == stream.test.kinds % 4).all()
        # Class 0 of either is label 0, but of its own experience, and a kind of its own.
        assert stream.test.experience[stream.test.kinds == 4].tolist() == [2, 2]
        assert [label for label in stream.label_of_class] == [0, 1, 2, 3] * 2

    def test_groups_that_would_mix_data_sets(self, cfg, tmp_path):
        cfg = dataclasses.replace(cfg, classes_per_task=8)
        with pytest.raises(ValueError, match="classes_per_task: expected a divisor of 4 classes, got 8"):
            Stream.from_config(cfg, configured_dataset(cfg, tmp_path))


class TestConfiguration:
    @pytest.mark.parametrize(
        ("field", "value"), [("image_size", 16), ("channels", 3), ("num_classes", 12)], ids=lambda v: str(v)
    )
    def test_and_data_must_agree(self, field, value):
        cfg = LEViTConfig.preset("digits", **{field: value})
        with pytest.raises(
            ValueError, match=f"{field}: the configuration says {value}, .* digits has .*; pass --{field[:3]}"
        ):
            Stream.from_config(cfg, load_dataset("digits"))

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_every_scenario(self, scenario):
        cfg = LEViTConfig.preset("digits", scenario=scenario, permutations=2, drift=0.0, class_order="shuffled", seed=3)
        stream = Stream.from_config(cfg, load_dataset("digits"), limit=40)
        random = np.random.RandomState(3)
        own = dict(permuted=dict(permutations=2), shuffled={}).get(scenario, dict(class_order="shuffled"))
        own |= dict(drift=0.0) if scenario == "drifting" else {}
        expected = getattr(scenarios, scenario)(load_dataset("digits"), random, limit=40, **own)
        assert (stream.plan.rows == expected.rows).all() and stream.experiences == expected.experiences

    def test_fewer_test_images_of_each_experience_in_proportion(self):
        data = load_dataset("digits")
        whole = Stream.from_config(LEViTConfig.preset("digits"), data)
        stream = Stream.from_config(LEViTConfig.preset("digits"), data, test_limit=50)
        assert np.bincount(stream.test.experience).tolist() == [10] * 5 and len(stream) == len(whole)
        assert (stream.plan.rows == whole.plan.rows).all()
        assert len(set(stream.plan.test_rows.tolist())) == 50 and (np.diff(stream.plan.test_rows) > 0).all()
        shown = data.to_float(data.test_images[stream.plan.test_rows])
        assert torch.equal(stream.test.images[:], shown)
        with pytest.raises(ValueError, match="limit: expected at least 5 images"):
            Stream.from_config(LEViTConfig.preset("digits"), data, test_limit=4)

    def test_a_data_set_of_ones_own(self, tmp_path):
        path = write_npz(tmp_path, "mine", **keras_arrays(size=6, classes=4, colours=3))
        cfg = LEViTConfig(dataset=str(path), image_size=6, channels=3, patch_size=3, num_classes=4)
        assert len(Stream.from_config(cfg, configured_dataset(cfg))) == 24


class TestHooks:
    @staticmethod
    def stream(**hooks):
        data = dataset()
        return Stream(data, scenarios.split(data, np.random.RandomState(0)), batch_size=4, **hooks)

    def test_augmentation_changes_training_images_alone_and_goes_on_where_it_stopped(self):
        def noisy(images, generator):
            return (images + 0.5 * torch.rand(images.shape, generator=generator)).clamp(0, 1)

        stream, plain = self.stream(augment=noisy), self.stream()
        whole = concatenated(stream)[0]
        assert torch.equal(whole, concatenated(stream)[0]) and torch.equal(whole[8:], concatenated(stream, start=8)[0])
        difference = whole - concatenated(plain)[0]
        assert (difference.flatten(1).std(1) > 0).all() and not torch.allclose(
            difference[:4], difference[4:8], atol=0.01
        )
        assert torch.equal(stream.test.images[:], plain.test.images[:])
        other = self.stream(augment=noisy, seed=1)
        assert not torch.equal(concatenated(other)[0], whole)

    def test_augmentation_cannot_write_into_the_data(self):
        stream = self.stream(augment=lambda images, generator: images.zero_())
        assert not concatenated(stream)[0].any() and stream.images.plain(slice(0, 20)).any()

    def test_normalisation_comes_last_and_reaches_both(self):
        stream = self.stream(augment=lambda images, generator: images * 0, normalize=lambda images: 1 - images)
        assert (concatenated(stream)[0] == 1).all()
        assert torch.equal(stream.test.images[2:4], 1 - self.stream().test.images[2:4])
        assert torch.equal(stream.test.of_experience(0).images[:], 1 - self.stream().test.of_experience(0).images[:])

    def test_leaving_0_to_1_is_explained(self):
        stream = self.stream(normalize=lambda images: (images - 0.5) / 0.2)
        for use in (lambda: next(iter(stream)), lambda: stream.test.images[:2]):
            with pytest.raises(ValueError, match=r"normalize: expected images in \[0, 1\], got -2.* to -2.*batch norm"):
                use()
        with pytest.raises(ValueError, match=r"augment: expected images in \[0, 1\], got"):
            next(iter(self.stream(augment=lambda images, generator: images - 1)))

    @pytest.mark.parametrize(
        ("hook", "got"),
        [
            (lambda images, generator: images[:, :, :1], r"torch.float32 \[4, 1, 1, 2\]"),
            (lambda images, generator: images.double(), "torch.float64"),
            (lambda images, generator: None, "NoneType"),
            (lambda images, generator: images * float("nan"), "nan"),
        ],
        ids=["shape", "dtype", "nothing", "nan"],
    )
    def test_what_is_no_image_any_more(self, hook, got):
        with pytest.raises(ValueError, match=f"augment: expected .*got .*{got}"):
            next(iter(self.stream(augment=hook)))
