"""The kernels on the sizes of known models: each figure has its bytes, its share and MLX's time."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from cortexmlx.bench.suites import known_models
from cortexmlx.bench.suites.known_models import KnownModel, measure_models
from cortexmlx.matmul.autotuning import ROWS
from cortexmlx.metal.lab.sim import metal_kernel
from support.kernels.broken_kernels import damaged

pytestmark = pytest.mark.lab  # kernels are executed

MODELS = (KnownModel("tiny", 1, 2, 16, 64, 64), KnownModel("tiny experts", 1, 2, 16, 64, 64, experts=2))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a simulator computes at once."""
    values = {"ROUNDS": 1, "DECODES": ((1, 40),), "BLOCKS": (16, 32), "PIECES": (128, 256), "PIECE": 16, "CONTEXT": 64}
    for name, value in {**values, "WINDOWS": (None, 20), "PRODUCT_SECONDS": 600.0}.items():
        monkeypatch.setattr(known_models, name, value)
    monkeypatch.setattr("cortexmlx.matmul.autotuning.PAIRS", (8,))


KERNELS = ("decode attention", "matmul", "prefill attention")


def test_every_kernel_has_bytes_times_and_a_share_of_the_bandwidth() -> None:
    found = list(measure_models(metal_kernel, "sim", MODELS))
    assert json.loads(json.dumps(found)) == found and not any("error" in record for record in found)
    dense = [record for record in found if record["model"] == "tiny"]
    sizes = {
        k: [r.get("block_size", r.get("rows", r.get("tokens"))) for r in dense if r["kernel"] == k] for k in KERNELS
    }
    assert sizes == {
        "decode attention": [16, 32],
        "matmul": [24, 16, 8, 4, 2, 1, 128, 256],
        "prefill attention": [16, 16],
    }
    assert [r["window"] for r in dense if r["kernel"] == "prefill attention"] == [None, 20]
    assert next(r["bytes"] for r in dense if r["kernel"] == "decode attention") == 2 * 40 * 16 * 4
    assert next(r["bytes"] for r in dense if r["kernel"] == "matmul") == 64 * 64 * 4 // 8 + 64 * 2 * 2
    assert {(r["kernel"], r["rows"]) for r in found if r.get("experts")} == {("matmul", 8)}
    for record in found:
        for name in ("seconds", "mlx_seconds"):
            share = record[name.replace("seconds", "bandwidth_share")]
            if record[name] is not None:
                wanted = record["bytes"] / 1e9 / record[name] / record["peak_gigabytes_per_second"]
                assert share == pytest.approx(wanted, abs=1e-4)
        alone = record["kernel"] == "matmul" and record["rows"] not in ROWS
        assert (record["seconds"] is None) is alone and record["mlx_seconds"] > 0


def test_a_kernel_that_is_wrong_has_an_error_or_a_refusal_and_the_others_their_figures() -> None:
    found = list(measure_models(damaged(lambda a: a + 0.5), "sim", MODELS[:1]))
    wrong = {record["kernel"]: record for record in found if record.get("error") or record.get("refused")}
    assert "differ by 0.5" in wrong["prefill attention"]["error"] and wrong["matmul"]["seconds"] is None
    assert "disagrees with float64" in str(wrong["matmul"]["refused"]) and len(found) == 2 + 8 + 1


def test_decode_attention_that_computes_something_else_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_models, "paged_attention", lambda queries, kv, params: queries)
    first = next(measure_models(metal_kernel, "reference", MODELS[:1]))
    assert "paged attention and MLX's attention differ by" in first["error"]


def test_a_known_gpu_has_its_published_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_models, "metal_device", lambda: "Apple M2 Max")
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert known_models.find_peak_bandwidth(1 << 20) == 400.0


def test_a_peak_is_that_of_reading_as_much_in_the_best_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([4.0, 2.0, 3.0, 1.0, *[8.0] * 6])
    monkeypatch.setattr(known_models, "seconds_per_call", lambda make: make() is not None and next(taken))
    found = known_models.find_peak_bandwidth(64 << 20)
    assert found == (64 << 20) / 1e9 / 1.0
