"""Huge pages are asked for where that makes sense, and never change a buffer."""

import pytest
import torch

from levit_kernels import native
from levit_kernels.huge_pages import huge_pages


def test_contents_stay():
    buffer = torch.arange(3 << 20, dtype=torch.float32)
    huge_pages(buffer[1:-1])
    assert torch.equal(buffer, torch.arange(3 << 20, dtype=torch.float32))


@pytest.mark.parametrize("elements", [0, 1, 1000])
def test_less_than_a_page_is_left_alone(elements):
    assert not huge_pages(torch.empty(elements))


def test_a_buffer_with_gaps_is_an_error():
    with pytest.raises(RuntimeError, match="buffer must be contiguous"):
        huge_pages(torch.empty(4, 1 << 20)[:, ::2])


def test_without_the_native_library_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: (False, "not built"))
    assert not huge_pages(torch.empty(1 << 21))
