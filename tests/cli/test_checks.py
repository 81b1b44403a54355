"""What doctor looks at."""

from __future__ import annotations

import importlib.metadata

import pytest

from cortexmlx.cli.checks import CHECKS, Verdict, all_checks


def test_a_wrong_version_of_mlx_lm_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0" if name == "mlx-lm" else real(name))
    [check] = [check for check in all_checks() if check.name == "mlx-lm"]
    assert check.verdict is Verdict.FAIL and check.advice.startswith("pip install 'mlx-lm==")


def test_a_package_that_is_missing_fails_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "mlx-lm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    [check] = [check for check in all_checks() if check.name == "mlx-lm"]
    assert check.verdict is Verdict.FAIL and check.detail == "not installed"
    assert check.advice.startswith("pip install 'mlx-lm==")


def test_another_system_than_apple_silicon_fails_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.cli.checks.sys.platform", "darwin")
    monkeypatch.setattr("cortexmlx.cli.checks.platform.machine", lambda: "x86_64")
    [check] = CHECKS["machine"]()
    assert check.verdict is Verdict.FAIL and "arm64" in check.advice


def test_switches_that_make_a_cpu_slow_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.cli.checks.sys.platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.delenv("CORTEXMLX_DEQUANTIZE", raising=False)
    assert [check.verdict for check in CHECKS["weights"]()] == [Verdict.OK]
    monkeypatch.setenv("CORTEXMLX_DEQUANTIZE", "0")
    [check] = CHECKS["weights"]()
    assert check.verdict is Verdict.WARN and check.advice == "unset CORTEXMLX_DEQUANTIZE for speed"
