"""torchvision's data sets, through torchvision's own readers, from small files in the exact formats of the real ones.

The real files of CIFAR-100 and SVHN are large; these differ in their number of images and so in their checksums, which
the tests give torchvision in place of the known ones.
"""

import gzip
import hashlib
import http.server
import pickle
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from stream_helpers import keras_arrays, write_npz
from torchvision import datasets

from levit.streams import DataError, load_dataset


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def idx(array):
    """The bytes of an array in the idx format of MNIST: big-endian sizes after a magic number."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


class Files(http.server.SimpleHTTPRequestHandler):
    """A server of files, which closes the connection in the middle of those named in `cut`."""

    cut = set()

    def copyfile(self, source, outputfile):
        content = source.read()
        outputfile.write(content[: len(content) // 2 if Path(self.path).name in self.cut else None])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """(address, folder) of files to download."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Files, "cut", set())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", folder
        server.shutdown()
        thread.join()


@pytest.fixture(params=["mnist", "fashion"])
def mirror(request, server, monkeypatch):
    """(name, arrays) of a data set whose four archives torchvision finds on the server."""
    kind = {"mnist": datasets.MNIST, "fashion": datasets.FashionMNIST}[request.param]
    address, folder = server
    arrays, known = keras_arrays(), []
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for key, suffix in (("x", "images-idx3"), ("y", "labels-idx1")):
            path = folder / f"{prefix}-{suffix}-ubyte.gz"
            path.write_bytes(gzip.compress(idx(arrays[f"{key}_{part}"])))
            known.append((path.name, md5(path)))
    monkeypatch.setattr(kind, "resources", known)
    monkeypatch.setattr(kind, "mirrors", [address])
    return request.param, arrays


def cifar(folder, kind, names, key, per_class, monkeypatch):
    """Batches of CIFAR in the format of its python version; returns images [n, 32, 32, 3] and labels by part."""
    random = np.random.RandomState(0)
    base = folder / kind.base_folder
    base.mkdir(parents=True)
    made = {}
    for part, files in (("train", kind.train_list), ("test", kind.test_list)):
        images, labels, known = [], [], []
        for file, _ in files:
            count = per_class * len(names)
            labels.append(random.permutation(np.repeat(np.arange(len(names)), per_class)).tolist())
            images.append(random.randint(0, 256, (count, 3072)).astype(np.uint8))
            # The batches were pickled by Python 2, whose strings are read as latin1; protocol 2 with str is the same.
            content = {
                "batch_label": file,
                key: labels[-1],
                "data": images[-1],
                "filenames": [f"{i}.png" for i in range(count)],
            }
            if key == "fine_labels":
                content["coarse_labels"] = [label // 5 for label in labels[-1]]
            (base / file).write_bytes(pickle.dumps(content, protocol=2))
            known.append([file, md5(base / file)])
        monkeypatch.setattr(kind, f"{part}_list", known)
        stacked = np.concatenate(images).reshape(-1, 3, 32, 32)
        made[part] = stacked, np.concatenate(labels)
    meta = base / kind.meta["filename"]
    meta.write_bytes(pickle.dumps({kind.meta["key"]: names}, protocol=2))
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(meta)})
    return made


@pytest.fixture
def svhn(tmp_path, monkeypatch):
    """SVHN's two .mat files, images last and digit 0 as label 10; returns images and labels as we want them."""
    random = np.random.RandomState(0)
    made, known = {}, dict(datasets.SVHN.split_list)
    for part, per_class in (("train", 3), ("test", 2)):
        labels = random.permutation(np.repeat(np.arange(10), per_class))
        images = random.randint(0, 256, (len(labels), 3, 32, 32)).astype(np.uint8)
        path = tmp_path / f"{part}_32x32.mat"
        mat = {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)}
        scipy.io.savemat(path, mat, do_compression=True)
        known[part] = [path.as_uri(), path.name, md5(path)]
        made[part] = images, labels
    monkeypatch.setattr(datasets.SVHN, "split_list", known)
    return made


def assert_equal(data, made):
    assert (data.train_images == made["train"][0]).all() and (data.train_labels == made["train"][1]).all()
    assert (data.test_images == made["test"][0]).all() and (data.test_labels == made["test"][1]).all()
    assert data.source.startswith("torchvision ") and len(data.sha256) == 64


class TestMNIST:
    def test_download(self, mirror, tmp_path):
        name, arrays = mirror
        data = load_dataset(name, tmp_path / "data", download=True)
        assert_equal(data, {part: (arrays[f"x_{part}"][:, None], arrays[f"y_{part}"]) for part in ("train", "test")})
        assert load_dataset(name, tmp_path / "data").sha256 == data.sha256

    def test_nothing_is_downloaded_unasked(self, mirror, tmp_path):
        name, _ = mirror
        with pytest.raises(DataError, match=rf"{name}: not found.*--download; or run: python -c .*MNIST as D"):
            load_dataset(name, tmp_path / "data")
        assert not (tmp_path / "data").exists()

    def test_a_download_that_broke_off_can_be_run_again(self, mirror, tmp_path):
        name, _ = mirror
        Files.cut.add("t10k-images-idx3-ubyte.gz")
        with pytest.raises(DataError, match="the download failed or broke off; run it again"):
            load_dataset(name, tmp_path / "data", download=True)
        Files.cut.clear()
        assert len(load_dataset(name, tmp_path / "data", download=True).test_labels) == 20

    @pytest.mark.parametrize("size", [0, 3, 16, 5000])
    def test_a_truncated_file_must_be_deleted_first(self, mirror, tmp_path, size):
        """torchvision takes an unpacked file for whole, so that fetching again would not mend it."""
        name, _ = mirror
        load_dataset(name, tmp_path / "data", download=True)
        raw = next((tmp_path / "data").glob("*/raw/train-images-idx3-ubyte"))
        raw.write_bytes(raw.read_bytes()[:size])
        with pytest.raises(DataError, match=rf"{name}: not found or damaged .* If .*{raw.parent}.* delete it first"):
            load_dataset(name, tmp_path / "data")

    def test_mislabelled(self, mirror, tmp_path):
        name, _ = mirror
        load_dataset(name, tmp_path / "data", download=True)
        raw = next((tmp_path / "data").glob("*/raw/t10k-labels-idx1-ubyte"))
        content = raw.read_bytes()
        raw.write_bytes(content[:8] + bytes(4 if label == 7 else label for label in content[8:]))
        with pytest.raises(DataError, match=rf"{name} below .*y_test: .*class 7 is empty.*--download"):
            load_dataset(name, tmp_path / "data")

    def test_a_file_of_ours_comes_first(self, mirror, tmp_path):
        name, arrays = mirror
        path = write_npz(tmp_path, name, **arrays)
        assert load_dataset(name, tmp_path, download=True).source == str(path)
        assert not (tmp_path / "MNIST").exists()


class TestCIFAR:
    @pytest.mark.parametrize(
        ("name", "kind", "classes", "key"),
        [("cifar10", datasets.CIFAR10, 10, "labels"), ("cifar100", datasets.CIFAR100, 100, "fine_labels")],
        ids=["cifar10", "cifar100"],
    )
    def test_batches(self, name, kind, classes, key, tmp_path, monkeypatch):
        made = cifar(tmp_path, kind, [f"name{i}" for i in range(classes)], key, 1, monkeypatch)
        data = load_dataset(name, tmp_path)
        assert_equal(data, made)
        assert data.num_classes == classes and data.image_shape == (3, 32, 32)
        assert data.origins[classes - 1] == (name, str(classes - 1))

    def test_truncated(self, tmp_path, monkeypatch):
        cifar(tmp_path, datasets.CIFAR100, [str(i) for i in range(100)], "fine_labels", 1, monkeypatch)
        path = tmp_path / "cifar-100-python" / "train"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(
            DataError, match=r"cifar100: not found or damaged .*cifar-100-python exists, delete it first"
        ):
            load_dataset("cifar100", tmp_path)

    def test_a_class_that_is_missing(self, tmp_path, monkeypatch):
        cifar(tmp_path, datasets.CIFAR100, [str(i) for i in range(99)], "fine_labels", 1, monkeypatch)
        with pytest.raises(DataError, match="cifar100 below .*: y_train: expected every label from 0 to 99, class 99"):
            load_dataset("cifar100", tmp_path)

    def test_a_pickle_that_torchvision_does_not_know_is_never_opened(self, tmp_path):
        """Its checksum is compared before it is read; so a pickle that runs code does not."""

        class Trap:
            def __reduce__(self):
                return exec, ("raise SystemExit('a pickle was opened')",)

        base = tmp_path / "cifar-100-python"
        base.mkdir()
        for name in ("train", "test", "meta"):
            (base / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(DataError, match="cifar100: not found or damaged"):
            load_dataset("cifar100", tmp_path)


class TestSVHN:
    def test_mat_files(self, svhn, tmp_path):
        data = load_dataset("svhn", tmp_path)
        assert_equal(data, svhn)
        assert data.num_classes == 10 and data.image_shape == (3, 32, 32)

    def test_truncated(self, svhn, tmp_path):
        path = tmp_path / "test_32x32.mat"
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(
            DataError, match=r"svhn: not found or damaged .*_32x32.mat exists.*SVHN as D.*'train', 'test'"
        ):
            load_dataset("svhn", tmp_path)


def test_torchvision_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match=r"svhn\.npz: no such file, and torchvision.*pip install torchvision"):
        load_dataset("svhn", tmp_path)


def test_the_remedy_is_a_command_that_runs(tmp_path, monkeypatch, mirror):
    name, _ = mirror
    with pytest.raises(DataError) as error:
        load_dataset(name, tmp_path / "data")
    command = str(error.value).split('python -c "')[1].rpartition('"')[0]
    exec(command, {})
    assert len(load_dataset(name, tmp_path / "data").train_labels) == 60
