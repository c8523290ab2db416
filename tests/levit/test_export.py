"""Models as files."""

import io
import warnings

import pytest
import torch
from helpers import VARIANTS, build, random_images, small_config

import levit
from levit.export import export_program

KINDS = [levit.reference.LEViT, levit.LEViT]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load(kind, dtype, tmp_path):
    model = build(kind, small_config(gamma=3.0), 3, dtype)
    model.save(tmp_path / "model.pt")
    loaded = kind.load(tmp_path / "model.pt")
    assert type(loaded) is kind and loaded.cfg == model.cfg and loaded.num_experts == 3
    images = random_images(model.cfg, 5, dtype)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_failed_save_keeps_the_earlier_file(tmp_path, monkeypatch):
    model = build(levit.LEViT, small_config(), 2)
    model.save(tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()

    def fail(content, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match="No space left"):
        model.save(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "corrupt, or no model"),
        (b"no zip at all", "corrupt, or no model"),
        ({"weights": torch.zeros(1)}, "corrupt, or no model"),
        ({"format": 1, "config": Evil(), "model": {}}, "corrupt, or no model"),
        ({"format": 99, "config": {}, "model": {}}, "format 99 of another version"),
        ({"format": 1, "config": {"colour": 1}, "model": {"a": torch.zeros(1)}}, "not a model of this version"),
        ({"format": 1, "config": {}, "model": {"a": torch.zeros(1)}}, "not a model of this version"),
    ],
)
def test_files_that_are_no_model(content, message, tmp_path, capsys):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=f"model.pt: {message}"):
        levit.LEViT.load(path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["dkf", "concat-per-head", "no-dkf"])
def test_exported_program(variant):
    """The same predictions after a round trip through a file, for other batch sizes too."""
    model = build(levit.LEViT, small_config(route_samples=2, **VARIANTS[variant]), 3)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own
        torch.export.save(export_program(model), file)
    file.seek(0)
    program = torch.export.load(file).module()
    with torch.no_grad():
        for count in (1, 5):
            images = random_images(model.cfg, count)
            torch.testing.assert_close(program(images), model(images), rtol=1e-9, atol=1e-9)
