"""The versions that must be equal everywhere."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest

from cortexmlx.distributed.launch import assignment as module
from cortexmlx.distributed.launch.assignment import package_versions


def test_they_are_those_that_the_packages_say_of_themselves() -> None:
    found = package_versions()
    assert list(found) == ["cortexmlx", "mlx", "mlx-lm"]
    assert mx.__version__.startswith(found["mlx"]) and found["mlx-lm"] == mlx_lm.__version__


def test_a_package_that_is_not_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGES", ("no-such-package",))
    assert package_versions() == {"no-such-package": "none"}
