"""What crosses between the engine's core and a runner: refusals are answers, and nothing needs mlx."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest

from cortexmlx.errors import KVBlockError, LogitsProcessorError, MemoryRefused
from cortexmlx.execution.boundary import Refusal, raise_if_refused, return_refusals
from cortexmlx.scheduling.plan import StepKind, StepPlan
from support.engine.asked import PROMPT
from support.engine.core_driver import Driver
from support.engine.refusals import SAID


@pytest.mark.parametrize(
    ("error", "is_resize"),
    [(RuntimeError(SAID), False), (MemoryError("no"), False), (MemoryRefused("the arena stays"), True)],
)
def test_a_refusal_of_memory_is_an_answer(error: Exception, is_resize: bool) -> None:
    @return_refusals
    def work() -> int:
        raise error

    assert work() == Refusal(str(error), is_resize)
    with pytest.raises(MemoryRefused, match=str(error).replace("[", r"\[")):
        raise_if_refused(work())


@pytest.mark.parametrize("error", [RuntimeError("it broke"), KVBlockError("a slot"), KeyboardInterrupt()])
def test_any_other_error_is_raised(error: BaseException) -> None:
    @return_refusals
    def work() -> int:
        raise error

    with pytest.raises(type(error)):
        work()


def test_an_answer_is_what_the_work_returns() -> None:
    @return_refusals
    def work(a: int, *, b: int) -> int:
        return a + b

    assert raise_if_refused(work(1, b=2)) == 3


def test_a_refusal_keeps_nothing_of_what_was_there_when_it_came() -> None:
    class Large:
        pass

    kept: list[Any] = []

    @return_refusals
    def work() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        error = MemoryError("no")
        kept.append(error)
        raise error

    work()
    assert kept[0]() is None, "the frames of the error hold it"


def test_plans_and_results_cross_as_bytes_though_functions_choose_the_tokens(tiny: Any) -> None:
    """The runner gets copies that were bytes on the way, of every plan, and so does the core of every result. The
    functions can be no bytes: they stay on the runner's side.
    """

    def least_likely(tokens: Any, logits: Any) -> Any:
        return -logits

    def broken(tokens: Any, logits: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(AttributeError):
        pickle.dumps(least_likely)

    def answers(crossed: bool) -> list[tuple[int, ...]]:
        driver, kinds = Driver(tiny("llama"), tokens=1024), set()
        runner = driver.core.runner
        if crossed:
            dispatch, collect = runner.dispatch, runner.collect

            def dispatch_copy(plan: StepPlan) -> Any:
                kinds.add((plan.kind, any(row.processed_for is not None for row in plan.sampling or ())))
                return dispatch(pickle.loads(pickle.dumps(plan)))

            runner.dispatch = dispatch_copy  # type: ignore[method-assign]
            runner.collect = lambda: pickle.loads(pickle.dumps(collect()))  # type: ignore[method-assign]
        handles = [
            driver.add(PROMPT, 20, logits_processors=[least_likely], n=2),
            driver.add(PROMPT[3:], 20, logprobs=2, prompt_logprobs=1, temperature=1.0),
            driver.add(PROMPT[5:], 20, logits_processors=[broken]),
        ]
        driver.finish()
        assert not crossed or kinds >= {(StepKind.MIXED, True), (StepKind.DECODE, True)}
        assert not runner.processors, "they go with their answers"
        with pytest.raises(LogitsProcessorError, match="ZeroDivisionError"):
            handles[2].result(0)
        results = [handle.result(0) for handle in handles[:2]]
        return [c.token_ids for r in results for c in (r, *r.others)]

    assert answers(crossed=True) == answers(crossed=False)
