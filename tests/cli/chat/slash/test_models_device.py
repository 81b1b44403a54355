"""The name of the device that computes on this machine."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.cli.chat.slash.models import device_line


def test_a_gpu_is_named_and_a_cpu_says_which_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert device_line().startswith("CPU, ") and "BLAS" in device_line()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Apple M3 Max"})
    assert device_line() == "Apple M3 Max (Metal)"
