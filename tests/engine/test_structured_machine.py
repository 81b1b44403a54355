"""Any order of structured and free requests, steps, cancels, stops and memory pressure: every answer is the one that
its request gets alone, or the beginning of it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cortexmlx import FinishReason, StructuredOutput
from cortexmlx.core.handle import RequestHandle
from cortexmlx.types.request import Completion
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of

COMPACT = {"whitespace_flexible": False}
SCHEMA = {
    "x-guidance": COMPACT,
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", 3]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: tuple[Any, ...] = (
    None,
    SCHEMA,
    StructuredOutput.regex("[ab]{2,20}-?"),
    StructuredOutput.choice(["red", "green", "greenish blue"]),
)


class Machine(RuleBasedStateMachine):
    """A core with few rows and a tight arena."""

    folder: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.folder, tokens=160, max_rows=3)
        self.asked: list[tuple[RequestHandle, dict[str, Any]]] = []

    @rule(
        form=st.integers(0, len(FORMS) - 1),
        prompt=st.integers(1, 40),
        count=st.integers(1, 40),
        seed=st.integers(0, 3),
        n=st.sampled_from((1, 1, 2)),
        stop=st.sampled_from(((), (), ("b",), ('"b"',))),
    )
    def add(self, **asked: Any) -> None:
        self.asked.append((_add(self.driver, asked), asked))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.driver.step(count)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            self.driver.core.cancel(data.draw(st.sampled_from(self.asked))[0].id)

    @rule(critical=st.booleans())
    def relieve(self, critical: bool) -> None:
        self.driver.core.relieve(critical)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.driver.core.check_invariants()
        requests = self.driver.core.requests
        assert requests._constrainable == sum(answer.matcher is not None for answer in requests.answers.values())

    def teardown(self) -> None:
        self.driver.finish()
        assert self.driver.core.requests._constrainable == 0
        for handle, asked in self.asked:
            answer = handle.result(0)
            alone = _alone(self.folder, tuple(sorted(asked.items())))
            for mine, other in zip((answer, *answer.others), (alone, *alone.others), strict=True):
                _check(mine, other, FORMS[asked["form"]])


def _add(driver: Driver, asked: dict[str, Any]) -> RequestHandle:
    form = FORMS[asked["form"]]
    # A free answer is greedy: with 320 tokens to draw from, rounding in another batch now and then draws the next one.
    temperature = 0.0 if asked["seed"] == 0 or form is None else 1.5
    return driver.add(
        tokens_of(asked["prompt"], seed=asked["prompt"]),
        asked["count"],
        seed=asked["seed"],
        n=asked["n"],
        stop=asked["stop"],
        structured=form,
        temperature=temperature,
        ignore_eos=form is None,
    )


@cache
def _alone(folder: Path, asked: tuple[tuple[str, Any], ...]) -> Completion:
    """The answer of an engine that has nothing else to do."""
    driver = Driver(folder, tokens=512)
    handle = _add(driver, dict(asked))
    driver.finish()
    return handle.result(0)


def _check(mine: Completion, alone: Completion, form: Any) -> None:
    if mine.finish_reason is FinishReason.CANCELLED:
        assert alone.token_ids[: len(mine.token_ids)] == mine.token_ids
        return
    assert (mine.token_ids, mine.text, mine.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
    if form is SCHEMA and mine.finish_reason is FinishReason.STOP and mine.text.endswith("}"):
        jsonschema.validate(mine.parsed, SCHEMA)


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("llama", 6),
        pytest.param("llama", 120, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 60, marks=pytest.mark.slow),
        pytest.param("mamba", 40, marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_the_one_that_its_request_gets_alone(name: str, examples: int, tiny: Any) -> None:
    Machine.folder = tiny(name)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None)
    )
