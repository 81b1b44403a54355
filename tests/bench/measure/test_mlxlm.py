"""mlx-lm beside the engine: the same work on the same weights, and what its padded batches hold."""

from __future__ import annotations

from cortexmlx import Engine
from cortexmlx.bench.measure.mlxlm import BatchSettings, MlxLmContestant
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.subject import CortexContestant
from cortexmlx.bench.measure.trace import BenchRequest, RunTrace


def test_both_sides_run_the_same_work_to_the_same_tokens(engine: Engine) -> None:
    prompts = PromptStream(512, 0)
    theirs = MlxLmContestant(engine.inspect(lambda core: core.loaded), BatchSettings(prefill_batch_size=2))
    for lengths in ([20], [5, 40, 17, 9, 30]):
        work = [BenchRequest(prompts.next_prompt(n), 6 + i) for i, n in enumerate(lengths)]
        mine, other = CortexContestant(engine).run(work), theirs.run(work)
        assert mine.tokens == other.tokens
        assert [len(t) for t in mine.tokens] == [w.max_tokens for w in work]


def test_padded_batches_hold_more_kv_memory_than_blocks(engine: Engine) -> None:
    prompts = PromptStream(512, 3)
    work = [BenchRequest(prompts.next_prompt(n), 4) for n in (400, 16, 16, 16)]
    settings = BatchSettings(completion_batch_size=4, prefill_batch_size=4, watch_kv=True)
    mine: RunTrace = CortexContestant(engine, watch_kv=True).run(work)
    other = MlxLmContestant(engine.inspect(lambda core: core.loaded), settings).run(work)
    per_token = engine.info.kv_bytes_per_token
    assert 448 * per_token <= mine.kv_bytes < (448 + 4 * 40) * per_token
    assert other.kv_bytes >= 4 * 400 * per_token
