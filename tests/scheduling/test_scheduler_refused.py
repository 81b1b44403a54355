"""Memory that the system refuses while drafts are given room: the row gets what there is, and fewer drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx.kv.sizing import max_row_blocks
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.types.request import RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.stage import Stage
from tests.scheduling.test_scheduler_model import SchedulerMachine


def begun(first: int) -> tuple[Any, Callable[..., Any]]:
    """A machine with a cache of so many blocks of a token, and what does one of its rules."""
    machine: Any = SchedulerMachine()

    def do(name: str, **arguments: Any) -> Any:
        step = getattr(SchedulerMachine, name)
        rule = getattr(step, "hypothesis_stateful_rule", None) or step.hypothesis_stateful_initialize_rule
        return rule.function(machine, **arguments)

    none = dict.fromkeys(("token_target", "client_tokens", "snapshots", "keep"))
    sizes = {"origin": 1, "block_size": 1, "first": first, "more": 0, "max_rows": 1, "prefill_budget": 1}
    off = {"pipeline": False, "headroom": 0, "share": False, "between": False, "worth_waiting": 1, "long_tail_rows": 0}
    do("begin", reaches=[AttentionWindow()], more_than_a_row=0, **sizes, **off, **none)
    return machine, do


def test_those_that_wait_end_with_the_one_that_ran_where_none_of_them_fits() -> None:
    """Nobody is left for whom there is nothing to compute. As the state machine found it."""
    machine, do = begun(first=2)
    do("memory_pressure", critical=True)
    do("the_system_refuses", share=0.0)
    machine.submit([0], SamplingParams(max_tokens=None), 0, False, None, None, False)
    do("press_equal_answers", after=0, answers=2, before=3, max_tokens=1, prompt=[0, 0], seed=0)
    machine.teardown()


def test_drafts_for_which_memory_is_refused_are_dropped() -> None:
    """As the state machine found it."""
    machine, do = begun(first=20)
    answers = do("press_equal_answers", after=0, answers=2, before=0, max_tokens=18, prompt=[0], seed=0)
    first, second = answers.values
    for name, arguments in (
        *(("run_ahead", {}), ("late_commit", {}), ("run_ahead", {}), ("end_at_a_stop_string", {"job": first})),
        *(("late_commit", {}), ("steps", {"count": 11}), ("the_system_refuses", {"share": 0.0}), ("late_commit", {})),
        *(("guess", {"job": second, "count": 11, "wrong": None, "more": []}), ("run_ahead", {})),
    ):
        do(name, **arguments)
        machine.books_balance()
    machine.teardown()


@pytest.mark.parametrize(("chunked", "block_size"), [(False, 1), (True, 1), (True, 4)])
def test_where_all_layers_have_windows_a_prompt_is_cut_smaller_if_the_cache_may_not_grow(
    chunked: bool, block_size: int
) -> None:
    """Its length is no limit, so the step failed, and every request with it. As the state machine found it."""
    window = AttentionWindow(16, chunked)
    least = max_row_blocks(window, block_size)
    assert least is not None
    stage = Stage(least, block_size, least + 8, [LayerGroup(KVSpec(1, 4, 4, "float32", 16, chunked=chunked), (0,))])
    stage.cache.pools._may_resize = lambda blocks: max(blocks) <= least
    job = stage.ask(list(range(7)) * 12, 20)
    stage.finish()
    assert job.state is RequestState.FINISHED and job.preemptions == 0
