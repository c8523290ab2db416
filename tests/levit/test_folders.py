"""Folders of pictures: ImageFolder's layout and Mini-ImageNet's, and what is wrong with them."""

import numpy as np
import pytest
from PIL import Image
from stream_helpers import save_pictures

from levit.streams import DataError, load_dataset
from levit.streams.folders import read_picture


def image_folder(root, train=6, test=2, side=8, parts=("train", "test"), classes=("cat", "dog")):
    """One shade per picture; returns the shades by part and class."""
    shades, number = {}, 0
    for part, count in zip(parts, (train, test), strict=False):
        for label in classes:
            shades[part, label] = list(range(number, number + count))
            save_pictures(root / part / label, shades[part, label], side)
            number += count
    return shades


class TestImageFolder:
    def test_train_and_test(self, tmp_path):
        shades = image_folder(tmp_path / "pets")
        data = load_dataset(f"{tmp_path}/pets", shape=(3, 8, 8))
        assert data.name == "pets" and data.image_shape == (3, 8, 8) and data.source == str(tmp_path / "pets")
        assert data.train_images[:, 0, 0, 0].tolist() == shades["train", "cat"] + shades["train", "dog"]
        assert data.train_labels.tolist() == [0] * 6 + [1] * 6
        assert data.test_images[:, 2, 7, 7].tolist() == shades["test", "cat"] + shades["test", "dog"]
        assert data.origins == (("pets", "cat"), ("pets", "dog"))

    def test_agrees_with_torchvision(self, tmp_path):
        from torchvision.datasets import ImageFolder

        image_folder(tmp_path / "pets", classes=("b", "A", "c10", "c9"))
        theirs, ours = ImageFolder(tmp_path / "pets" / "train"), load_dataset(f"{tmp_path}/pets")
        assert [label for _, label in ours.origins] == theirs.classes
        assert ours.train_labels.tolist() == theirs.targets
        for i, (picture, _) in enumerate(theirs):
            assert (ours.train_images[i].transpose(1, 2, 0) == np.asarray(picture)).all()

    def test_without_parts_every_fifth_picture_is_a_test_image(self, tmp_path):
        for label, first in (("cat", 0), ("dog", 100)):
            save_pictures(tmp_path / "pets" / label, range(first, first + 11), 8)
        data = load_dataset("pets", tmp_path, shape=(1, 8, 8))
        assert data.test_images[:, 0, 0, 0].tolist() == [4, 9, 104, 109]
        assert data.train_images[:, 0, 0, 0].tolist() == [
            *(0, 1, 2, 3, 5, 6, 7, 8, 10),
            *range(100, 104),
            *range(105, 109),
            110,
        ]

    def test_val_serves_as_test(self, tmp_path):
        image_folder(tmp_path / "pets", parts=("train", "val"))
        assert len(load_dataset(f"{tmp_path}/pets").test_labels) == 4

    def test_other_files_are_passed_over(self, tmp_path):
        image_folder(tmp_path / "pets")
        (tmp_path / "pets" / "README").write_text("")
        (tmp_path / "pets" / "train" / "cat" / "Thumbs.db").write_text("")
        assert len(load_dataset(f"{tmp_path}/pets").train_labels) == 12

    def test_the_middle_square_is_resized(self, tmp_path):
        wide = np.zeros((10, 30, 3), np.uint8)
        wide[:, 10:20] = 200
        Image.fromarray(wide).save(tmp_path / "wide.png")
        assert (read_picture(tmp_path / "wide.png", 3, 5) == 200).all()
        assert read_picture(tmp_path / "wide.png", 1).shape == (10, 30)

    def test_grey_and_transparent_pictures(self, tmp_path):
        Image.fromarray(np.full((4, 4), 77, np.uint8)).save(tmp_path / "grey.png")
        Image.fromarray(np.full((4, 4, 4), 77, np.uint8)).save(tmp_path / "alpha.png")
        for name in ("grey.png", "alpha.png"):
            assert (read_picture(tmp_path / name, 3) == 77).all() and read_picture(tmp_path / name, 3).shape == (
                4,
                4,
                3,
            )

    def test_sixteen_bits_are_refused(self, tmp_path):
        """Pillow would cut them off at 255."""
        Image.fromarray(np.full((4, 4), 3000, np.uint16)).save(tmp_path / "deep.png")
        with pytest.raises(DataError, match="deep.png: expected 8 bits per colour, got a picture of mode I;16"):
            read_picture(tmp_path / "deep.png", 1)

    def test_an_empty_class(self, tmp_path):
        image_folder(tmp_path / "pets")
        (tmp_path / "pets" / "train" / "bird").mkdir()
        with pytest.raises(DataError, match="train/bird: this class is empty"):
            load_dataset(f"{tmp_path}/pets")

    def test_a_class_that_is_never_tested(self, tmp_path):
        image_folder(tmp_path / "pets")
        save_pictures(tmp_path / "pets" / "train" / "bird", [1], 8)
        with pytest.raises(DataError, match="test/bird: no such folder, though .*train/bird is a class"):
            load_dataset(f"{tmp_path}/pets")

    def test_one_part_alone(self, tmp_path):
        image_folder(tmp_path / "pets", parts=("train",))
        with pytest.raises(DataError, match="pets: train and test must both be there, or neither"):
            load_dataset(f"{tmp_path}/pets")

    def test_too_few_to_hold_any_out(self, tmp_path):
        save_pictures(tmp_path / "pets" / "cat", range(4), 8)
        with pytest.raises(DataError, match="class cat: expected at least 5 pictures"):
            load_dataset(f"{tmp_path}/pets")

    def test_no_classes(self, tmp_path):
        (tmp_path / "pets").mkdir()
        with pytest.raises(DataError, match=r"pets: no class folders here. Expected a folder with train/CLASS"):
            load_dataset(f"{tmp_path}/pets")
        with pytest.raises(DataError, match="nowhere: no such file or folder"):
            load_dataset(f"{tmp_path}/nowhere")

    @pytest.mark.parametrize("keep", [0, 20, 45])
    def test_a_truncated_picture(self, tmp_path, keep):
        image_folder(tmp_path / "pets")
        path = sorted((tmp_path / "pets" / "train" / "dog").iterdir())[2]
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DataError, match=f"{path}: missing, truncated or no picture"):
            load_dataset(f"{tmp_path}/pets")

    def test_sizes_that_differ_where_none_is_asked_for(self, tmp_path):
        image_folder(tmp_path / "pets")
        save_pictures(tmp_path / "pets" / "train" / "dog", [99], 9)
        with pytest.raises(DataError, match=r"099.png: \[9, 9, 3\] where .*000.png is \[8, 8, 3\]"):
            load_dataset(f"{tmp_path}/pets")
        assert load_dataset(f"{tmp_path}/pets", shape=(3, 8, 8)).image_shape == (3, 8, 8)

    def test_without_pillow(self, tmp_path, monkeypatch):
        image_folder(tmp_path / "pets")
        monkeypatch.setitem(__import__("sys").modules, "PIL", None)
        with pytest.raises(DataError, match="pictures need Pillow"):
            load_dataset(f"{tmp_path}/pets")


@pytest.fixture
def miniimagenet(tmp_path):
    """The archive as it is handed around, with 4 + 2 + 2 classes of 5 pictures."""
    folder, number = tmp_path / "miniimagenet", 0
    (folder / "images").mkdir(parents=True)
    for split, classes in (("train", 4), ("val", 2), ("test", 2)):
        lines = ["filename,label"]
        for c in range(classes):
            label = f"n0{'tvx'[('train', 'val', 'test').index(split)]}{c}"
            for i in range(5):
                name = f"{label}{i:08d}.jpg"
                Image.fromarray(np.full((84, 84, 3), number, np.uint8)).save(folder / "images" / name, quality=95)
                lines.append(f"{name},{label}")
                number += 3
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


class TestMiniImageNet:
    def test_all_classes_of_the_three_lists(self, miniimagenet, tmp_path):
        data = load_dataset("miniimagenet", tmp_path, shape=(3, 84, 84))
        assert data.num_classes == 8 and data.image_shape == (3, 84, 84)
        assert data.train_labels.tolist() == np.repeat(np.arange(8), 4).tolist()
        assert data.test_labels.tolist() == list(range(8))
        assert [label for _, label in data.origins] == sorted(
            ["n0t0", "n0t1", "n0t2", "n0t3", "n0v0", "n0v1", "n0x0", "n0x1"]
        )
        assert np.abs(data.test_images[:, 0, 5, 5].astype(int) - np.arange(12, 120, 15)).max() <= 1
        assert np.abs(data.train_images[:4, 1, 80, 0].astype(int) - [0, 3, 6, 9]).max() <= 1

    def test_a_list_is_missing(self, miniimagenet, tmp_path):
        (miniimagenet / "val.csv").unlink()
        with pytest.raises(DataError, match="miniimagenet/val.csv: cannot be read"):
            load_dataset("miniimagenet", tmp_path)

    @pytest.mark.parametrize(
        "content", ["", "file,class\na,b\n", "filename,label\nx.jpg\n"], ids=["empty", "names", "cut"]
    )
    def test_a_damaged_list(self, miniimagenet, tmp_path, content):
        (miniimagenet / "test.csv").write_text(content)
        with pytest.raises(DataError, match="test.csv: expected the columns filename and label in every line"):
            load_dataset("miniimagenet", tmp_path)

    def test_a_picture_is_missing(self, miniimagenet, tmp_path):
        next((miniimagenet / "images").glob("n0v1*3.jpg")).unlink()
        with pytest.raises(DataError, match="n0v100000003.jpg: missing, truncated or no picture"):
            load_dataset("miniimagenet", tmp_path)

    def test_folders_per_class_will_do(self, tmp_path):
        image_folder(tmp_path / "miniimagenet")
        assert load_dataset("miniimagenet", tmp_path).num_classes == 2

    def test_nothing_there(self, tmp_path):
        (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(b"")
        with pytest.raises(DataError, match=r"miniimagenet\.npz: no such file\. .*images/ and train.csv.*never opened"):
            load_dataset("miniimagenet", tmp_path)
