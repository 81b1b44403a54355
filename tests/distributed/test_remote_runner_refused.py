"""Memory that is refused to some ranks before a pass: it costs no answer, and all ranks stay alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import MemoryRefused
from cortexmlx.execution.boundary import Refusal
from cortexmlx.execution.runner import ModelRunner
from support.engine.core_driver import Driver
from support.engine.refusals import SAID
from support.engine.same_tokens import TIGHT
from support.hosts.answers import answers_of, expected_of
from support.hosts.whole_ranks import changed, engines_on_ranks
from support.models.tiny import tokens_of

Tiny = Callable[[str], Path]


class Refusing:
    """Has a part of a runner's memory raise at its n-th call, for the n in `times`."""

    def __init__(self, where: str, times: set[int], error: Exception) -> None:
        self.left = set(times)
        self._where, self._error, self._count = where, error, 0

    def __call__(self, runner: ModelRunner) -> None:
        own = getattr(runner.memory, self._where)

        def refuses(*args: Any) -> Any:
            self._count += 1
            if self._count in self.left:
                self.left.discard(self._count)
                raise self._error
            return own(*args)

        setattr(runner.memory, self._where, refuses)


@pytest.mark.parametrize(
    ("rank", "where", "error"),
    [
        (0, "resize", MemoryRefused("the arena stays as it is")),
        (1, "resize", RuntimeError(SAID)),
        (1, "flush", RuntimeError(SAID)),
        (0, "copy", MemoryError("no")),
    ],
)
def test_memory_that_is_refused_before_a_pass_costs_no_answer(
    tiny: Tiny, small_arenas: None, rank: int, where: str, error: Exception
) -> None:
    expected = expected_of(tiny("llama"), TIGHT * 4)
    change = Refusing(where, {1}, error)
    with engines_on_ranks(2, tiny("llama"), changed({rank: change}), compare_every=1) as made:
        assert answers_of(tiny("llama"), tokens=TIGHT * 4) == expected
    assert not change.left, "it was never refused"
    assert len({state.blocks for state in made[0].runner.ranks}) == 1


@pytest.mark.parametrize("second", [None, MemoryRefused("it stays"), RuntimeError(SAID)])
def test_what_some_ranks_were_granted_is_undone(tiny: Tiny, small_arenas: None, second: Exception | None) -> None:
    """Rank 1 is refused the larger arena. Rank 0, which has it already, goes back, or is refused that, too."""
    changes = {1: Refusing("resize", {1}, MemoryRefused("no"))}
    if second is not None:
        changes[0] = Refusing("resize", {2}, second)
    with engines_on_ranks(2, tiny("llama"), changed(changes)) as made:
        driver, runner = Driver(tiny("llama")), made[0].runner
        before = runner.blocks
        larger = tuple(2 * count for count in before)
        assert runner.resize(larger) == Refusal("no", of_arena=second is None)
        assert runner.blocks == before
        assert [state.blocks for state in runner.ranks] == [before if second is None else larger, before]
        assert runner.resize(larger) is None and {state.blocks for state in runner.ranks} == {larger}
        driver.core.release()


def test_an_arena_grows_only_if_all_ranks_would_be_given_the_memory(tiny: Tiny, small_arenas: None) -> None:
    asked: list[Any] = []

    def refuses(runner: ModelRunner) -> None:
        runner.can_resize = lambda blocks: bool(asked.append(blocks))  # type: ignore[method-assign]

    with engines_on_ranks(2, tiny("llama"), changed({1: refuses}), compare_every=1) as made:
        driver = Driver(tiny("llama"), tokens=1024)
        before = made[0].runner.blocks
        assert not driver.core.runner.can_resize((1,)) and asked.pop() == (1,)
        driver.answers([tokens_of(60, seed=n) for n in range(6)], 30)
        assert asked and made[0].runner.blocks == before
        driver.core.release()


def test_no_rank_has_an_arena_if_one_cannot_begin(tiny: Tiny) -> None:
    change = Refusing("begin", {1}, MemoryRefused("no arena here"))
    with engines_on_ranks(2, tiny("llama"), changed({1: change})) as made:
        with pytest.raises(MemoryRefused, match="no arena here"):
            Driver(tiny("llama"))
        assert {state.blocks for state in made[0].runner.ranks} == {(0,)}


@pytest.mark.parametrize("worse", [0, 1])
def test_an_arena_stays_only_if_it_is_whole_on_all_ranks(tiny: Tiny, small_arenas: None, worse: int) -> None:
    """One rank refuses in words that say that its arena has not changed, another one in words that say nothing."""
    changes = {
        worse: Refusing("resize", {1}, RuntimeError(SAID)),
        1 - worse: Refusing("resize", {1}, MemoryRefused("it stays")),
    }
    with engines_on_ranks(2, tiny("llama"), changed(changes)) as made:
        driver, runner = Driver(tiny("llama")), made[0].runner
        larger = tuple(2 * count for count in runner.blocks)
        assert runner.resize(larger) == Refusal(SAID, of_arena=False)
        driver.core.release()
