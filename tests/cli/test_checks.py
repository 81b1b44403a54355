"""What doctor looks at."""

from __future__ import annotations

import pytest

from cortexmlx.cli.checks import Verdict, all_checks


def test_a_wrong_version_of_mlx_lm_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0" if name == "mlx-lm" else real(name))
    [check] = [check for check in all_checks() if check.name == "mlx-lm"]
    assert check.verdict is Verdict.FAIL and check.advice.startswith("pip install 'mlx-lm==")
