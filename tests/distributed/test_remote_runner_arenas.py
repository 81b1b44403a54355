"""Whatever happens to requests and memory, the arenas of all ranks have the same bytes, and plans cross unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cortexmlx.errors import MemoryRefused
from cortexmlx.execution.runner import ModelRunner
from support.engine.core_driver import Driver
from support.hosts.whole_ranks import changed, engines_on_ranks
from support.models.tiny import tokens_of

EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(2, 60), st.integers(1, 24), st.integers(1, 2), st.sampled_from([0.0, 0.9])),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("relieve"), st.booleans()),
    st.tuples(st.just("compact")),
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(  # what a rank keeps of free blocks is nobody's
    [("add", 2, 1, 1, 0.0), ("add", 2, 1, 1, 0.0), ("step", 1), ("step", 1), ("relieve", True)], {1}, "resize"
)
@given(
    st.lists(EVENTS, min_size=4, max_size=14),
    st.sets(st.integers(1, 6), max_size=2),
    st.sampled_from(["resize", "flush", "copy"]),
)
def test_arenas_stay_equal(
    tiny: Callable[[str], Path], small_arenas: None, events: list[Any], refused: set[int], where: str
) -> None:
    """Rank 1 is refused memory now and then, before a pass."""
    copies: list[Any] = []

    def is_copied(runner: ModelRunner) -> None:
        """Copy the arena when the runner is told to trim: on its own thread."""
        runner.trim = lambda: copies.append(runner.copy_out(0, range(runner.blocks[0])))  # type: ignore[method-assign]

    def refuses(runner: ModelRunner) -> None:
        is_copied(runner)
        own, count = getattr(runner.memory, where), [0]

        def call(*args: Any) -> Any:
            count[0] += 1
            if count[0] in refused:
                raise MemoryRefused("now and then") if where == "resize" else MemoryError("now and then")
            return own(*args)

        setattr(runner.memory, where, call)

    with engines_on_ranks(2, tiny("llama"), changed({0: is_copied, 1: refuses}), compare_every=1) as made:
        driver = Driver(tiny("llama"), tokens=256, max_rows=4)
        handles = []
        for number, event in enumerate([*events, ("step", 10_000)]):
            match event:
                case "add", length, tokens, answers, temperature:
                    prompt = tokens_of(60, seed=number % 3)[:length]
                    handles.append(driver.add(prompt, tokens, seed=number, n=answers, temperature=temperature))
                case "step", count:
                    driver.step(count)
                case "cancel", index if index < len(handles):
                    driver.core.cancel(handles[index].id)
                case "relieve", critical:
                    driver.core.relieve(critical)
                case ("compact",):
                    driver.core.compact()
            driver.core.check_invariants()
        driver.core.tidy()
        copies.clear()
        assert len({state.blocks for state in made[0].runner.ranks}) == 1
        made[0].runner.trim()
        free_runs = driver.core.cache.pools[0].allocator.free_runs()
        free = {block for run in free_runs for block in range(run.start, run.stop)}
        for block, (copy, same) in enumerate(zip(*copies, strict=True)):
            assert copy is not None and same is not None
            assert block in free or all(np.array_equal(a, b) for a, b in zip(copy, same, strict=True))
        driver.core.release()
