"""Rows that lose their blocks find again what they had computed."""

from __future__ import annotations

from typing import Any

from cortexmlx.scheduling.job import Job
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of


def test_a_row_that_resumes_finds_what_it_had_computed(tiny: Any, theirs: Any) -> None:
    """While the memory allows it: here the first row ends soon, and the second continues where it was."""
    driver = Driver(tiny("llama"), tokens=160, max_rows=2)
    prompts = [tokens_of(40, seed=1), tokens_of(40, seed=2)]
    handles = [driver.add(prompts[0], 50), driver.add(prompts[1], 60)]
    resumed: list[tuple[int, int]] = []
    begin = driver.core.scheduler._running_set.begin

    def watching(job: Job, *match: Any) -> Any:
        copies = begin(job, *match)
        if job.preemptions:
            resumed.append((driver.core.cache.tables.length(job.id), len(job.tokens)))
        return copies

    driver.core.scheduler._running_set.begin = watching  # type: ignore[method-assign]
    driver.finish()
    for prompt, handle, count in zip(prompts, handles, (50, 60), strict=True):
        assert list(driver.result(handle).token_ids) == theirs("llama", prompt, count)
    assert resumed and any(found > 8 for found, _ in resumed), resumed
    assert_nothing_lost(driver.core.stats())
