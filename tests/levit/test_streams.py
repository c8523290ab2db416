"""Data sets by name, what is wrong with a file, and the split stream that hides its changes."""

import sys
import types

import numpy as np
import pytest
import torch
from stream_helpers import dataset, keras_arrays, write_npz

from levit.config import LEViTConfig
from levit.streams import DataError, SplitStream, default_data_dir, load_dataset


def concatenated(stream, start=0):
    images, labels = zip(*stream.batches(start), strict=True)
    return torch.cat(images), torch.cat(labels)


class TestDigits:
    def test_every_image_is_on_one_side_of_a_split_of_80_to_20_per_class(self):
        from sklearn.datasets import load_digits

        data = load_dataset("digits")
        raw = load_digits()
        together = np.concatenate([data.train_images, data.test_images])[:, 0]
        key = lambda images: sorted(image.tobytes() for image in images.astype(np.uint8))  # noqa: E731
        assert key(together) == key(raw.images)
        for label in range(10):
            train, test = (data.train_labels == label).sum(), (data.test_labels == label).sum()
            assert test == (raw.target == label).sum() // 5
            assert train + test == (raw.target == label).sum()

    def test_sixteen_becomes_one(self):
        data = load_dataset("digits")
        images = data.to_float(data.train_images)
        assert data.train_images.max() == 16 and images.max() == 1 and images.min() == 0
        assert images.dtype == torch.float32 and images.shape[1:] == (1, 8, 8)

    def test_is_the_same_every_time(self):
        a, b = load_dataset("digits"), load_dataset("digits")
        assert a.sha256 == b.sha256
        assert (a.test_images == b.test_images).all() and (a.test_labels == b.test_labels).all()


class TestFiles:
    def test_npz_in_the_layout_of_keras(self, tmp_path):
        arrays = keras_arrays()
        write_npz(tmp_path, **arrays)
        data = load_dataset("mnist", tmp_path)
        assert (data.train_images[:, 0] == arrays["x_train"]).all() and (data.test_labels == arrays["y_test"]).all()
        assert data.image_shape == (1, 28, 28) and data.num_classes == 10
        assert data.train_labels.dtype == np.int64

    def test_colours_last_and_labels_as_a_column(self, tmp_path):
        arrays = keras_arrays(size=5, classes=3, colours=3)
        write_npz(tmp_path, "mine", **arrays | {"y_train": arrays["y_train"][:, None]})
        data = load_dataset("mine", tmp_path)
        assert data.image_shape == (3, 5, 5)
        assert (data.train_images[4, 2] == arrays["x_train"][4, :, :, 2]).all()
        assert (data.train_labels == arrays["y_train"]).all()

    def test_checksum_is_that_of_the_file(self, tmp_path):
        import hashlib

        path = write_npz(tmp_path, **keras_arrays())
        assert load_dataset("mnist", tmp_path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()

    def test_folder_from_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LEVIT_DATA", str(tmp_path))
        write_npz(tmp_path, **keras_arrays())
        assert default_data_dir() == tmp_path and len(load_dataset("mnist").train_labels) == 60
        monkeypatch.delenv("LEVIT_DATA")
        assert default_data_dir().parts[-3:] == (".cache", "levit", "data")

    @pytest.mark.parametrize(
        ("change", "said"),
        {
            "missing array": (lambda a: a.pop("y_test"), "array y_test is missing"),
            "floats": (lambda a: a.update(x_train=a["x_train"] / 255), "x_train: expected uint8, got float64"),
            "not square": (lambda a: a.update(x_test=a["x_test"][:, :20]), "x_test: expected"),
            "flat": (lambda a: a.update(x_train=a["x_train"].reshape(60, -1)), r"x_train: expected .* got \[60, 784\]"),
            "four colours": (lambda a: a.update(x_test=np.zeros((20, 8, 8, 4), np.uint8)), "x_test: expected"),
            "no images": (lambda a: a.update(x_test=a["x_test"][:0]), "x_test: expected"),
            "sizes differ": (lambda a: a.update(x_test=a["x_test"][:, :14, :14]), "x_test: expected images as in x_tr"),
            "labels short": (lambda a: a.update(y_train=a["y_train"][:-1]), r"y_train: expected \[60\]"),
            "labels float": (lambda a: a.update(y_train=a["y_train"] / 2), "y_train: expected whole numbers"),
            "label negative": (lambda a: a.update(y_test=a["y_test"].astype(int) - 1), "y_test: expected labels of"),
            "class empty": (lambda a: a["y_train"].__setitem__(a["y_train"] == 4, 5), "y_train: .* class 4 is empty"),
            "never tested": (lambda a: a["y_test"].__setitem__(a["y_test"] == 9, 0), "y_test: .* class 9 is empty"),
        }.values(),
        ids=lambda value: "" if callable(value) else value[:20],
    )
    def test_wrong_content_is_named_with_a_remedy(self, tmp_path, change, said):
        arrays = keras_arrays()
        change(arrays)
        path = write_npz(tmp_path, **arrays)
        with pytest.raises(DataError, match=said) as error:
            load_dataset("mnist", tmp_path)
        assert str(path) in str(error.value) and "--download" in str(error.value)

    def test_truncated_at_any_point(self, tmp_path):
        path = write_npz(tmp_path, **keras_arrays())
        whole = path.read_bytes()
        for size in (0, 10, 1000, len(whole) // 2, len(whole) - 30):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match="truncated or no .npz file"):
                load_dataset("mnist", tmp_path)

    def test_damaged_inside(self, tmp_path):
        path = write_npz(tmp_path, **keras_arrays())
        content = bytearray(path.read_bytes())
        content[2000] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match="truncated or no .npz file"):
            load_dataset("mnist", tmp_path)

    def test_pickles_are_not_opened(self, tmp_path):
        write_npz(tmp_path, **keras_arrays() | {"y_test": np.array([object()])})
        with pytest.raises(DataError, match="allow_pickle"):
            load_dataset("mnist", tmp_path)

    def test_unknown_name(self, tmp_path):
        with pytest.raises(DataError, match=r"nothing\.npz: no such file.*layout of Keras.*digits, mnist"):
            load_dataset("nothing", tmp_path)


class TestTorchvision:
    """Against a stand-in with torchvision's interface, which need not be installed."""

    @pytest.fixture
    def calls(self, monkeypatch):
        calls = []
        arrays = keras_arrays()

        def mnist(root, train, download):
            calls.append((root, train, download))
            if not download:
                raise RuntimeError("Dataset not found. You can use download=True to download it")
            part = "train" if train else "test"
            return types.SimpleNamespace(data=torch.tensor(arrays[f"x_{part}"]), targets=arrays[f"y_{part}"].tolist())

        module = types.ModuleType("torchvision")
        module.__version__, module.datasets = "0.0", types.SimpleNamespace(MNIST=mnist)
        monkeypatch.setitem(sys.modules, "torchvision", module)
        return calls

    def test_loads_both_parts(self, calls, tmp_path):
        data = load_dataset("mnist", tmp_path, download=True)
        assert [call[1:] for call in calls] == [(True, True), (False, True)] and calls[0][0] == tmp_path
        assert data.train_images.shape == (60, 1, 28, 28) and len(data.sha256) == 64

    def test_nothing_is_downloaded_unasked(self, calls, tmp_path):
        with pytest.raises(DataError, match=r"mnist: not found.*--download; or run: python -c .*MNIST as D"):
            load_dataset("mnist", tmp_path)
        assert not any(download for *_, download in calls)

    def test_a_file_comes_first(self, calls, tmp_path):
        write_npz(tmp_path, **keras_arrays())
        assert load_dataset("mnist", tmp_path, download=True).source.endswith("mnist.npz")
        assert not calls

    def test_an_interrupted_download_is_told(self, calls, tmp_path, monkeypatch):
        def broken(root, train, download):
            raise RuntimeError("File not found or corrupted.")

        monkeypatch.setattr(sys.modules["torchvision"].datasets, "MNIST", broken)
        with pytest.raises(DataError, match="the download failed or broke off; run it again"):
            load_dataset("mnist", tmp_path, download=True)

    def test_not_installed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(DataError, match=r"mnist\.npz: no such file, and torchvision.*pip install torchvision"):
            load_dataset("mnist", tmp_path)


class TestSplit:
    def test_experiences_follow_each_other_and_cover_every_image_once(self):
        data = dataset()
        stream = SplitStream(data, classes_per_task=2, batch_size=3, seed=7)
        _, labels = concatenated(stream)
        assert set(labels[:10].tolist()) == {0, 1} and set(labels[10:].tolist()) == {2, 3}
        assert sorted(stream.indices) == list(range(20))
        assert stream.ends == [10, 20] and stream.change_points == [10] and stream.experiences == [(0, 1), (2, 3)]

    def test_a_batch_may_straddle_a_change_and_carries_images_and_labels_alone(self):
        stream = SplitStream(dataset(), batch_size=3)
        batches = list(stream)
        assert all(len(batch) == 2 and all(type(part) is torch.Tensor for part in batch) for batch in batches)
        assert [len(labels) for _, labels in batches] == [3] * 6 + [2]
        assert {int(label) // 2 for label in batches[3][1]} == {0, 1}

    def test_images_belong_to_their_labels_and_indices(self):
        data = dataset()
        stream = SplitStream(data, batch_size=4, seed=2)
        images, labels = concatenated(stream)
        assert (images[:, 0, 0, 0] * 255).round().int().tolist() == stream.indices.tolist()
        assert labels.tolist() == data.train_labels[stream.indices].tolist()
        assert images.dtype == torch.float32 and images.max() <= 1

    def test_starting_anywhere_gives_the_rest(self):
        stream = SplitStream(dataset(), batch_size=4, seed=2)
        whole, rest = concatenated(stream), concatenated(stream, start=8)
        assert torch.equal(whole[0][8:], rest[0]) and torch.equal(whole[1][8:], rest[1])
        assert list(stream.batches(start=20)) == []

    def test_the_seed_decides_the_order(self):
        orders = [SplitStream(dataset(), seed=seed).indices.tolist() for seed in (0, 0, 1)]
        assert orders[0] == orders[1] != orders[2]
        checksums = [SplitStream(dataset(), seed=seed).checksum() for seed in (0, 0, 1)]
        assert checksums[0] == checksums[1] != checksums[2]

    def test_class_order(self):
        assert SplitStream(dataset(), class_order=[3, 0, 1, 2]).experiences == [(3, 0), (1, 2)]
        shuffled = [SplitStream(dataset(), class_order="shuffled", seed=seed).class_order for seed in range(5)]
        assert all(sorted(order) == [0, 1, 2, 3] for order in shuffled) and len(set(map(tuple, shuffled))) > 1
        for wrong in ("random", [0, 1, 2], [0, 1, 2, 2]):
            with pytest.raises(ValueError, match="class_order: expected natural, shuffled or"):
                SplitStream(dataset(), class_order=wrong)

    def test_experience_of_labels(self):
        stream = SplitStream(dataset(), class_order=[3, 0, 1, 2])
        assert stream.experience_of(np.array([0, 1, 2, 3, 3])).tolist() == [0, 1, 1, 0, 0]

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
        data = dataset(train=train, test=(1, 1, 1, 1))
        stream = SplitStream(data, classes_per_task=2, limit=limit)
        assert np.diff([0, *stream.ends]).tolist() == sizes and len(stream) == sum(sizes)
        assert len(set(stream.indices)) == len(stream)

    def test_limit_below_one_image_per_experience(self):
        with pytest.raises(ValueError, match="limit: expected at least 2 images, one per experience, got 1"):
            SplitStream(dataset(), limit=1)

    def test_classes_that_cannot_be_split(self):
        with pytest.raises(ValueError, match="classes_per_task: expected a divisor of 4 classes, got 3"):
            SplitStream(dataset(), classes_per_task=3)

    @pytest.mark.parametrize(
        ("field", "value"), [("image_size", 16), ("channels", 3), ("num_classes", 12)], ids=lambda v: str(v)
    )
    def test_configuration_and_data_must_agree(self, field, value):
        cfg = LEViTConfig.preset("digits", **{field: value})
        with pytest.raises(ValueError, match=f"{field}: the configuration says {value}, data set digits has"):
            SplitStream.from_config(cfg, load_dataset("digits"))
