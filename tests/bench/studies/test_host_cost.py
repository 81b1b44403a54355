"""What the Metal path costs the host: measured on real steps, with kernels that compute nothing."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.bench.studies import host_cost
from cortexmlx.cpu.feed import EarlyEvaluator


def test_a_stub_gives_outputs_of_the_shapes_and_types_that_were_asked_for() -> None:
    kernel = host_cost.make_stub_kernel(name="any")
    first, second = kernel(output_shapes=[(2, 3), (4,)], output_dtypes=[mx.float16, mx.int32], grid=(1, 1, 1))
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((2, 3), mx.float16, (4,), mx.int32)


def test_the_texts_that_are_sent_are_shorter_than_those_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "PAIRS", 2)
    costs = {cost.kernel: cost for cost in host_cost.measure_text_costs()}
    assert costs.keys() == {
        f"cortex_paged_{name}" for name in ("decode", "matrix", "matrix_quantized", "wide", "reduce")
    }
    for cost in costs.values():
        assert (
            2_000 < cost.sent_bytes < 0.75 * cost.written_bytes and cost.written_seconds > 0 and cost.sent_seconds > 0
        )
    assert costs["cortex_paged_matrix"].sent_bytes < 0.8 * costs["cortex_paged_matrix_quantized"].sent_bytes


@pytest.mark.parametrize("rows", [1, 3])
def test_every_step_of_a_window_goes_through_the_kernels(
    rows: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cost, "STEPS", 12)
    calls: list[tuple[int, ...]] = []
    stub_factory = host_cost.make_stub_kernel

    def factory(**options: object) -> object:
        call = stub_factory(**options)

        def counted(**arguments: object) -> object:
            calls.append(arguments["output_shapes"][0])  # type: ignore[index]
            return call(**arguments)

        return counted

    monkeypatch.setattr(host_cost, "make_stub_kernel", factory)
    fed: list[bool] = []
    monkeypatch.setattr(EarlyEvaluator, "__call__", lambda feed, *_: fed.append(feed.enabled))
    cost = host_cost.measure_host_cost(model, rows)
    assert cost.rows == rows and 0 < cost.attention < cost.build and cost.mlx_lm > 0
    assert fed and not any(fed), "the feed is a CPU's"
    attended = [shape for shape in calls if shape[0] == rows and len(shape) == 4]
    assert len(attended) >= 2 * 10, "two layers, every step of the rows together"
