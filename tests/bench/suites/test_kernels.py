"""Paged attention on scattered blocks beside MLX's: the same result, or there is no figure."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.bench.suites import kernels
from cortexmlx.bench.suites.kernels import OURS, THEIRS, KernelInputs, KernelShape, PeakBandwidth, measure_kernels
from cortexmlx.errors import CortexError

SMALL = KernelShape(3, 40, kv_heads=2, group=2, dim=16)


def test_both_kernels_are_measured_in_bytes_of_keys_and_values() -> None:
    found, source = measure_kernels([SMALL], 8, "reference", 2, lambda what: None)
    assert [(s.kernel, len(s.rates)) for s in found] == [(OURS, 2), (THEIRS, 2)]
    assert "in this run" in source and all(min(*s.rates, s.peak) > 0 for s in found)
    assert KernelInputs(SMALL, 8, mx.float32, "reference").bytes == 2 * 3 * 2 * 40 * 16 * 4


def test_a_kernel_that_computes_something_else_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "paged_attention", lambda queries, kv, params: queries)
    with pytest.raises(CortexError, match="differ"):
        measure_kernels([SMALL], 8, "reference", 1, lambda what: None)


def test_a_known_gpu_has_its_published_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "metal_device", lambda: "Apple M2 Max")
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert kernels.find_peak_bandwidth(1 << 20) == PeakBandwidth(400.0, "published for the M2 Max")


def test_a_peak_is_that_of_reading_as_much_in_the_best_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([4.0, 2.0, 3.0, 1.0, *[8.0] * 6])
    monkeypatch.setattr(kernels, "seconds_per_call", lambda make: make() is not None and next(taken))
    found = kernels.find_peak_bandwidth(64 << 20)
    assert found.rate == (64 << 20) / 1e9 / 1.0 and "of that size" in found.source
