"""Data sets by name or path, what is wrong with a file, duplicates, and several data sets joined into one."""

import dataclasses

import numpy as np
import pytest
import torch
from stream_helpers import dataset, keras_arrays, write_npz

from levit.config import LEViTConfig
from levit.streams import DataError, configured_dataset, default_data_dir, load_dataset
from levit.streams.dataset import count_duplicates


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
        with pytest.raises(
            DataError, match=r"nothing\.npz: no such file.*layout of Keras.*digits, miniimagenet, mnist"
        ):
            load_dataset("nothing", tmp_path)

    def test_a_path_of_ones_own(self, tmp_path):
        path = write_npz(tmp_path, "mine", **keras_arrays(size=5))
        data = load_dataset(str(path), "/nowhere")
        assert data.name == "mine" and data.source == str(path) and data.image_shape == (1, 5, 5)
        with pytest.raises(DataError, match="other.npz: no such file or folder. A data set is an .npz file"):
            load_dataset(str(tmp_path / "other.npz"))

    def test_an_npy_file_is_no_npz_file(self, tmp_path):
        with open(tmp_path / "mine.npz", "wb") as file:
            np.save(file, np.zeros(3))
        with pytest.raises(DataError, match="truncated or no .npz file"):
            load_dataset("mine", tmp_path)


class TestDuplicates:
    def test_are_counted(self):
        data = dataset(train=(4, 4), test=(2, 2))
        data.train_images[3] = data.train_images[1]
        data.train_labels[[1, 3]] = [0, 1]
        data.train_images[5] = data.train_images[1]
        data.train_labels[5] = 0
        data.test_images[:] += 50
        data.test_images[2] = data.train_images[1]
        data.test_labels[2] = 1
        # Rows 3 and 5 repeat row 1, one of them with another label, and so does a test image.
        assert count_duplicates(data) == {"repeated": 2, "leaked": 1, "contradicting": 2}

    def test_are_used_and_told(self, tmp_path):
        arrays = keras_arrays()
        arrays["x_test"][3] = arrays["x_train"][0]
        arrays["x_train"][7] = arrays["x_train"][5]
        write_npz(tmp_path, **arrays)
        with pytest.warns(
            UserWarning, match="mnist: 1 training images occur more than once, 1 test images are training"
        ):
            data = load_dataset("mnist", tmp_path)
        assert len(data.train_labels) == 60 and len(data.test_labels) == 20

    def test_none_is_no_warning(self, tmp_path, recwarn):
        write_npz(tmp_path, **keras_arrays())
        load_dataset("mnist", tmp_path)
        assert not recwarn.list


class TestJoined:
    def files(self, folder):
        write_npz(folder, "grey", **keras_arrays(size=4, classes=2))
        write_npz(folder, "colour", **keras_arrays(size=8, classes=4, colours=3, seed=1))
        return LEViTConfig(
            scenario="joined", dataset="grey+colour", image_size=8, channels=3, patch_size=4, num_classes=6
        )

    def test_both_in_one_shape_and_classes_side_by_side(self, tmp_path):
        data = configured_dataset(self.files(tmp_path), tmp_path)
        grey, colour = load_dataset("grey", tmp_path), load_dataset("colour", tmp_path)
        assert data.name == "grey+colour" and data.image_shape == (3, 8, 8) and data.part_sizes == [2, 4]
        assert data.origins == (("grey", "0"), ("grey", "1"), *(("colour", str(i)) for i in range(4)))
        assert data.train_labels.tolist() == [*grey.train_labels.tolist(), *(colour.train_labels + 2).tolist()]
        for channel in range(3):
            assert (data.train_images[:12, channel, 2:6, 2:6] == grey.train_images[:, 0]).all()
        border = data.test_images[:4].copy()
        border[:, :, 2:6, 2:6] = 0
        assert not border.any()
        assert (data.test_images[4:] == colour.test_images).all()

    def test_the_checksum_is_that_of_the_order_too(self, tmp_path):
        cfg = self.files(tmp_path)
        other = dataclasses.replace(cfg, dataset="colour+grey")
        assert configured_dataset(cfg, tmp_path).sha256 != configured_dataset(other, tmp_path).sha256

    def test_digits_are_brought_to_255(self, tmp_path):
        write_npz(tmp_path, "grey", **keras_arrays(size=8, classes=2))
        data = configured_dataset(
            LEViTConfig(scenario="joined", dataset="digits+grey", image_size=8, patch_size=2), tmp_path
        )
        digits = load_dataset("digits")
        count = len(digits.train_labels)
        ours, theirs = data.to_float(data.train_images[:count]), digits.to_float(digits.train_images)
        assert (ours - theirs).abs().max() <= 0.5 / 255 + 1e-6

    @pytest.mark.parametrize(
        ("name", "change", "said"),
        [
            ("grey", {}, "dataset: scenario joined expects several, as in mnist"),
            ("grey+grey", {}, "dataset: expected different data sets"),
            ("grey+colour", dict(channels=1), r"colour: images of \[3, 8, 8\] cannot be shown as \[1, 8, 8\]"),
            ("grey+colour", dict(image_size=4), r"colour: images of \[3, 8, 8\] cannot be shown as \[3, 4, 4\]"),
            ("grey+colour", dict(image_size=9, patch_size=3), r"grey: images of \[1, 4, 4\] cannot be shown"),
            ("grey+nothing", {}, "nothing.npz: no such file"),
        ],
        ids=["one", "twice", "colours", "too large", "uneven", "missing"],
    )
    def test_what_does_not_go_together(self, tmp_path, name, change, said):
        cfg = dataclasses.replace(self.files(tmp_path), dataset=name, **change)
        with pytest.raises(DataError, match=said):
            configured_dataset(cfg, tmp_path)
