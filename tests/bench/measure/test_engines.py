"""Engines of several block sizes that compute with one copy of the weights."""

from __future__ import annotations

from contextlib import ExitStack

from mlx.utils import tree_flatten

from cortexmlx import SamplingParams
from cortexmlx.bench.measure.engines import BenchPlan, open_engines


def test_they_share_the_weights_and_hold_what_they_must(model: str) -> None:
    told: list[str] = []
    plan = BenchPlan(model, (), None, "auto", 1, 0, told.append)
    with ExitStack() as stack:
        engines = open_engines(plan, stack, [(8, 600_000), (16, 100)], 2, prefix_cache=False)
        first, second = engines[8], engines[16]
        arrays = [dict(tree_flatten(e.inspect(lambda core: core.loaded.model.parameters()))) for e in engines.values()]
        assert all(arrays[0][name] is arrays[1][name] for name in arrays[0])
        assert first.stats().kv_bytes_limit >= 600_000 * first.info.kv_bytes_per_token
        assert (first.stats().block_size, second.stats().block_size) == (8, 16)
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        assert first.generate([5, 6, 7], params).token_ids == second.generate([5, 6, 7], params).token_ids
    assert any("loading" in line for line in told)


def test_settings_name_what_changes_figures() -> None:
    plain = BenchPlan("m", (), None, "auto", 1, 0, None)
    assert plain.settings != BenchPlan("m", (), None, "auto", 1, 0, None, kv_bits=8).settings
    plain.report_progress("nobody listens")
