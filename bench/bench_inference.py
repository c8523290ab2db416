"""Routed inference of 256 images and of 1 image, routes uniform over the experts: reference and fused model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.cases import INFERENCE

pytestmark = pytest.mark.parametrize("case", INFERENCE, indirect=True)


@pytest.mark.parametrize("variant", ["reference", "fused"])
def test_inference(time_variant: Callable[[str], None], variant: str) -> None:
    time_variant(variant)
