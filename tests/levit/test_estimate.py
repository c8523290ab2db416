"""`levit estimate`: counts against the model's own, and times that are times."""

import dataclasses
import json

import pytest
import torch
from helpers import small_config

from levit import Learner, LEViT, cli
from levit.estimate import estimate


@pytest.mark.parametrize("criterion", ["latent", "energy"])
def test_counts_are_those_of_the_model_at_work(criterion):
    cfg = small_config(criterion=criterion, energy_threshold=1.0 if criterion == "energy" else None)
    found = estimate(cfg, 3, seconds=0.01)
    model = LEViT(cfg)
    model.add_expert()
    model.add_expert()
    tensors = [*model.parameters(), *model.buffers()]
    assert found["parameters"] == sum(p.numel() for p in model.parameters()) and found["experts"] == 3
    assert found["model_bytes"] == sum(t.numel() * t.element_size() for t in tensors)
    assert found["memory_bytes"] == 20 * 3 * 6 * 6 * 4
    per_image = 2 * cfg.num_tokens * cfg.feature_dim + 2 * (cfg.latent_dim if criterion == "latent" else 1)
    assert found["cache_bytes"] == 20 * per_image * 4 and found["cache_stores_features"]


def test_measures_a_full_memory_with_the_rule_asked_at_every_batch(monkeypatch):
    events = []
    observe = Learner.observe
    monkeypatch.setattr(Learner, "observe", lambda *args: events.append(observe(*args)) or events[-1])
    found = estimate(small_config(gamma=1e-9), 3, seconds=0.05)
    assert len(events) >= 2 and all(event.loss is not None for event in events)
    assert all(len(event.distances) == 2 and not event.expanded for event in events)
    assert found["seconds_per_thousand_images"] > 0 and found["prediction_seconds_per_thousand_images"] > 0


def test_one_expert_has_nothing_frozen():
    found = estimate(small_config(max_experts=1), 1, seconds=0.01)
    assert found["experts"] == 1 and found["cache_bytes"] == 0 and found["seconds_per_thousand_images"] > 0


@pytest.mark.parametrize("cache", ["off", 10])
def test_features_that_are_not_stored(cache):
    cfg = small_config(cache=cache)
    if cache == "off":
        found = estimate(cfg, 2, seconds=0.01)
    else:
        with pytest.warns(UserWarning, match="over the budget"):
            found = estimate(cfg, 2, seconds=0.01)
    assert not found["cache_stores_features"] and found["cache_bytes"] == 20 * cfg.latent_dim * 4


def test_the_limit_of_the_configuration_does_not_stand_in_the_way():
    assert estimate(dataclasses.replace(small_config(), max_experts=2), 3, seconds=0.01)["experts"] == 3


class TestCommand:
    FLAGS = "--memory-size 40 --train-batch 16 --threads 1 --seconds 0.05".split()

    @pytest.fixture(autouse=True)
    def threads(self):
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    def test_text(self, capsys):
        assert cli.main(["estimate", "digits", "--experts", "2", *self.FLAGS]) == 0
        text = capsys.readouterr().out
        assert "digits, 2 experts, cpu, 1 thread(s)" in text
        for word in (
            "parameters",
            "memory",
            "cache",
            "learning",
            "prediction",
            "s per thousand images",
            "for 40 images",
        ):
            assert word in text

    def test_json(self, capsys):
        assert cli.main(["estimate", "digits", "--experts", "2", "--json", *self.FLAGS]) == 0
        assert json.loads(capsys.readouterr().out)["experts"] == 2

    def test_mistakes(self, capsys):
        assert cli.main(["estimate", "digit"]) == 2 and "Did you mean 'digits'?" in capsys.readouterr().err
        assert cli.main(["estimate"]) == 2 and "levit estimate PRESET" in capsys.readouterr().err
        assert cli.main(["estimate", "digits", "--experts", "0"]) == 2
        assert "experts: expected at least 1, got 0" in capsys.readouterr().err
