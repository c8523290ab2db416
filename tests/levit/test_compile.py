"""torch.compile takes both models; where it breaks a graph it is for routing or packing, never for an op."""

import pytest
import torch
from helpers import build, random_images, small_config

import levit


@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
def test_features_compile(kind):
    model = build(kind, small_config(), 2, torch.float32)
    images = random_images(model.cfg, 4, torch.float32)
    compiled = torch.compile(model.features, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model.features(images))
        graph = torch._dynamo.explain(model.features)(images)
    assert all("_Stack.rows" in str(reason.reason) for reason in graph.break_reasons)


@pytest.mark.full
@pytest.mark.parametrize("kind", [levit.reference.LEViT, levit.LEViT])
def test_routed_prediction_compiles(kind):
    model = build(kind, small_config(), 3, torch.float32)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        for count in (6, 1, 9):
            images = random_images(model.cfg, count, torch.float32)
            torch.testing.assert_close(compiled(images), model(images))
