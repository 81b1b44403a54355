"""How far something is, as a program reads it; and every way of asking that tells how far a long prompt is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cortexmlx import CortexError, Engine, Progress, SamplingParams, TokenEvent
from support.engine.asked import SHORT
from support.models.tiny import tokens_of
from support.patience import PATIENCE

LONG_PROMPT = tokens_of(200, seed=3)
"""Seven pieces of 32 tokens: progress is told of the first at least."""


@pytest.mark.parametrize(
    ("progress", "unit", "fraction"),
    [
        (Progress("downloading", 0, 0), "bytes", 0.0),
        (Progress("downloading", 11, 10), "bytes", 1.0),
        (Progress("loading", 1, 4), "steps", 0.25),
        (Progress("prefilling", 3000, 4000, cached=1000), "tokens", 0.75),
    ],
)
def test_a_share_is_between_nothing_and_all_and_its_unit_is_known(
    progress: Progress, unit: str, fraction: float
) -> None:
    assert (progress.unit, progress.fraction) == (unit, fraction)


def check(events: list[TokenEvent]) -> None:
    """Progress first, then the tokens that come without it, and one completion."""
    told = [event.progress for event in events if event.progress is not None]
    assert told and all(p.what == "prefilling" and p.total == 200 and p.done < 200 for p in told)
    assert [p.done for p in told] == sorted(p.done for p in told)
    kinds = ["progress" if e.progress else "token" if e.token_id is not None else "end" for e in events]
    assert kinds == ["progress"] * len(told) + ["token"] * 12 + ["end"]
    assert all(not event.text for event in events[: len(told)])


def test_whoever_reads_or_listens_is_told_before_the_first_token(engine: Engine) -> None:
    check(list(engine.stream(LONG_PROMPT, SHORT, cache=False)))
    heard: list[TokenEvent] = []
    told: list[TokenEvent] = []
    ended = threading.Event()

    def on_event(event: TokenEvent) -> None:
        told.append(event)
        if event.completion is not None:
            ended.set()

    handle = engine.submit(LONG_PROMPT, SHORT, listener=heard.append, on_event=on_event, cache=False)
    assert handle.result(PATIENCE) is heard[-1].completion and ended.wait(PATIENCE)
    check(heard)
    check(told)

    async def read() -> list[TokenEvent]:
        return [event async for event in engine.astream(LONG_PROMPT, SHORT, cache=False)]

    check(asyncio.run(read()))


def test_a_whole_answer_can_be_waited_for_with_progress(engine: Engine) -> None:
    seen: list[Progress] = []
    quiet = engine.generate(LONG_PROMPT, SHORT, cache=False)
    assert engine.generate(LONG_PROMPT, SHORT, cache=False, on_progress=seen.append).token_ids == quiet.token_ids
    assert seen and seen[0].total == 200
    seen.clear()
    answer = asyncio.run(engine.agenerate(LONG_PROMPT, SHORT, cache=False, on_progress=seen.append))
    assert answer.token_ids == quiet.token_ids and seen and seen[0].total == 200
    talk, question = engine.conversation(params=SHORT), "word " * 50
    seen.clear()
    answer = talk.ask(question, on_progress=seen.append)
    assert {p.total for p in seen} == {answer.usage.prompt_tokens} and seen[-1].done < seen[-1].total
    other = engine.conversation(params=SamplingParams(max_tokens=4))
    seen.clear()
    answer = asyncio.run(other.aask(question[::-1], on_progress=seen.append))
    assert {p.total for p in seen} == {answer.usage.prompt_tokens}


def test_a_program_that_has_seen_enough_cancels_the_request(engine: Engine) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    talk: Any = engine.conversation(params=SHORT)
    for ask in (
        lambda: engine.generate(LONG_PROMPT, SHORT, on_progress=stop),
        lambda: talk.ask("x" * 150, None, on_progress=stop),
    ):
        with pytest.raises(KeyboardInterrupt):
            ask()
    assert talk.messages == () and len(engine.generate(LONG_PROMPT, SHORT).token_ids) == 12
    with pytest.raises(CortexError):
        engine.generate([], on_progress=stop)
