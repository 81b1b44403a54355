"""Memory that the system refuses while drafts are given room: the row gets what there is, and fewer drafts."""

from __future__ import annotations

from typing import Any

from cortexmlx.kv.spec import AttentionWindow
from tests.scheduling.test_scheduler_model import SchedulerMachine


def test_drafts_for_which_memory_is_refused_are_dropped() -> None:
    """As the state machine found it."""
    machine: Any = SchedulerMachine()

    def do(name: str, **arguments: Any) -> Any:
        step = getattr(SchedulerMachine, name)
        rule = getattr(step, "hypothesis_stateful_rule", None) or step.hypothesis_stateful_initialize_rule
        return rule.function(machine, **arguments)

    none = dict.fromkeys(("token_target", "client_tokens", "snapshots", "keep"))
    sizes = {"origin": 1, "block_size": 1, "first": 20, "more": 0, "max_rows": 1, "prefill_budget": 1}
    off = {"pipeline": False, "headroom": 0, "share": False, "between": False, "worth_waiting": 1, "long_tail_rows": 0}
    do("begin", reaches=[AttentionWindow()], more_than_a_row=0, **sizes, **off, **none)
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
