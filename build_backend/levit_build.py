"""setuptools' PEP 517 backend, which asks for torch only where the target environment has none.

An isolated build cannot see the environment it installs into. Naming torch in `build-system.requires` would therefore
download it a second time for every build, although the headers of the torch that is already there do as well.
"""

from __future__ import annotations

from typing import Any

from environment import TORCH_MINIMUM, find_torch
from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks of the backend)
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch_if_missing()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch_if_missing()]


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_sdist(config_settings)


def _torch_if_missing() -> list[str]:
    torch = find_torch()
    if torch is not None and torch.new_enough:
        return []
    return ["torch>=" + ".".join(map(str, TORCH_MINIMUM))]
