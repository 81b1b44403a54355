"""Nothing stale is ever read: with NaN in every free block, every unwritten slot and every unused tail column, all
answers are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortexmlx.core import in_process_model
from cortexmlx.errors import NoTokenToChoose
from cortexmlx.kv.spec import LONG_TAIL_COLUMNS, TAIL_COLUMNS
from cortexmlx.scheduling.plan import SCRATCH_SLOT, StepKind, StepPlan
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


class Poison:
    """Fills with NaN, before every step that writes the arena, all slots that no plan has written since their block
    was free; and the columns of every new tail that are not written yet.
    """

    def __init__(self, driver: Driver) -> None:
        import mlx.core as mx

        self.core = driver.core
        self.slots = 0
        self.columns: set[int] = set()
        self._nan = mx.array(float("nan"))
        self._written = [
            np.zeros(self.core.runner.arena.slots_per_slab(g), bool) for g in range(len(self.core.cache.groups))
        ]
        runner = self.core.runner
        self._dispatch, self._tail_write = runner.dispatch, runner.memory.write_tail
        runner.dispatch = self.dispatch  # type: ignore[method-assign]
        runner.memory.write_tail = self.tail_write  # type: ignore[method-assign]

    def dispatch(self, plan: StepPlan) -> Any:
        if plan.kind is not StepKind.DECODE or plan.flush is not None or plan.copies:
            self._poison(plan)
        return self._dispatch(plan)

    def tail_write(self, layer: int, column: int, columns: int, new: Any) -> Any:
        tail = self._tail_write(layer, column, columns, new)
        if column == 0:
            for array in tail:
                array[:, :, 1:] = self._nan.astype(array.dtype)
        assert tail[0].shape[2] == columns
        self.columns.add(columns)
        return tail

    def _poison(self, plan: StepPlan) -> None:
        arena, cache = self.core.runner.arena, self.core.cache
        assert arena.blocks == cache.pools.blocks, "the arena of this test does not grow"
        size = cache.block_size
        for group, written in enumerate(self._written):
            null = range(arena.null_block(group) * size, (arena.null_block(group) + 1) * size)
            copied = {c.source for c in plan.copies if c.group == group}
            for run in cache.pools[group].allocator.free_runs():
                gone = np.arange(run.start * size, run.stop * size)
                written[gone[~np.isin(gone // size, list(copied))]] = False
            stale = np.flatnonzero(~written)
            stale = stale[(stale < null.start) | (stale >= null.stop)]
            stale = stale[~np.isin(stale // size, list(copied))]  # copied first, whoever gives it up in this plan
            arena.fill(group, stale, float("nan"))
            self.slots += len(stale)
            writes = [] if plan.flush is None else [plan.flush.writes[group]]
            if plan.kind is StepKind.MIXED:
                writes.append(plan.writes[group])
            for write in writes:
                slots = np.concatenate([write.slots, write.zeros])
                written[slots[slots != SCRATCH_SLOT]] = True
            for copy in plan.copies:
                if copy.group == group:
                    target, source = (slice(b * size, (b + 1) * size) for b in (copy.target, copy.source))
                    written[target] = written[source]


@pytest.mark.parametrize(
    ("name", "prefix_cache"),
    [
        *(("windowed llama", False), ("gpt_oss", True), ("deepseek_v2", True)),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("gemma3_text", "llama4")),
    ],
)
def test_poisoned_memory_changes_no_answer(name: str, prefix_cache: bool, tiny: Any) -> None:
    shared = tokens_of(21, seed=99)
    prompts = [tokens_of(n, seed=n) for n in (1, 5, 8, 17, 30)] + [[*shared, *tokens_of(n, seed=n)] for n in (1, 6, 12)]

    def answers(poisoned: bool) -> tuple[list[Any], int]:
        driver = Driver(tiny(name), tokens=144, max_rows=4, prefill_budget=14, prefix_cache=prefix_cache)
        poison = Poison(driver) if poisoned else None
        handles = []
        for i, prompt in enumerate(prompts):
            handles.append(driver.add(prompt, 10 + 6 * (i % 4), logprobs=2))
            driver.step(4 * (i % 3))
        handles[3].cancel()
        driver.finish()
        results = [driver.result(h) for h in handles]
        return [(r.token_ids, r.logprobs) for r in results], poison.slots if poison else 0

    clean, _ = answers(False)
    poisoned, slots = answers(True)
    assert slots > 500, "there must be something to poison for this test to say anything"
    assert poisoned == clean


def test_poison_beside_a_long_tail_changes_no_answer(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: up to two rows have a long tail, so rows come and go between tails of both lengths."""
    prompts = [tokens_of(n, seed=n) for n in (5, 17, 30)]
    plain = Driver(tiny("llama"), tokens=1024).answers(prompts, 90)
    monkeypatch.setattr(in_process_model, "auto_backend_name", lambda: "metal")
    monkeypatch.setattr(in_process_model, "max_long_tail_rows", lambda *_: 2)
    driver = Driver(tiny("llama"), tokens=1024)
    poison = Poison(driver)
    handles = [driver.add(prompt, 90) for prompt in prompts[:2]]
    driver.step(40)
    handles.append(driver.add(prompts[2], 90))
    driver.finish()
    assert [driver.result(h).token_ids for h in handles] == plain
    assert poison.columns == {TAIL_COLUMNS, LONG_TAIL_COLUMNS} and poison.slots > 100


def test_a_reader_of_stale_slots_is_caught(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same poison under an engine that forgets to zero the rest of the blocks it opens."""
    import cortexmlx.scheduling.builder as placement

    Driver(tiny("llama")).answers([tokens_of(12), tokens_of(5)], 20)
    monkeypatch.setattr(placement, "_slots_to_zero", lambda *_: placement.EMPTY_INDICES)
    driver = Driver(tiny("llama"))
    Poison(driver)
    with pytest.raises(NoTokenToChoose):  # its logits are NaN
        driver.answers([tokens_of(12), tokens_of(5)], 20)
