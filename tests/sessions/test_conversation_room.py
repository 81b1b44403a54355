"""Conversations that outgrow the context, have several answers, or go on with another engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import InvalidRequest, PromptTooLong
from cortexmlx.sessions.conversation import Conversation

WORDS = SamplingParams(max_tokens=21, ignore_eos=True)


@pytest.fixture
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("one layer"), kv_memory="512KB", block_size=8, max_rows=3, max_request_tokens=300) as opened:
        yield opened


def full(engine: Engine) -> Conversation:
    """One that has no room for 60 tokens more."""
    talk = engine.conversation(system="Be brief.", params=WORDS)
    while talk.context_left >= 60:
        talk.ask(f"question {len(talk.messages)}")
    return talk


def test_the_oldest_turns_give_way_and_the_tokens_are_those_of_the_rest(engine: Engine) -> None:
    talk, question = full(engine), "x" * 60
    said = talk.messages
    with pytest.raises(PromptTooLong, match=r"or let make_room\(\) leave out the oldest turns$"):
        talk.ask(question)
    dropped = talk.make_room(100, question)
    assert 0 < dropped == talk.unsent and talk.messages == said
    assert talk.count(question) + 100 <= engine.longest_request
    one_less = talk.fork()
    one_less.unsent -= 2
    assert one_less.count(question) + 100 > engine.longest_request, "as few as it takes"
    judge = engine.conversation(system="Be brief.", messages=said[dropped:], params=WORDS)
    assert talk.ask(question).token_ids == judge.ask(question).token_ids
    assert talk.messages[: len(said)] == said and talk.make_room(10) == 0


def test_all_turns_give_way_to_a_question_that_fits_alone_and_none_to_one_that_does_not(engine: Engine) -> None:
    talk = full(engine)
    for call in (lambda text: talk.make_room(0, text), talk.ask):
        with pytest.raises(PromptTooLong, match=f"still has 3.. tokens, and .* may have {engine.longest_request}: "):
            call("x" * engine.longest_request)
    assert talk.unsent == 0
    longest = "x" * (engine.longest_request - engine.conversation(system="Be brief.").count("") - 30)
    assert talk.make_room(100, longest) == talk.unsent == len(talk.messages)
    assert talk.ask(longest).usage.completion_tokens == WORDS.max_tokens
    last = talk.fork()
    assert last.make_room(100) == 0, "the last question is never left out"


def test_what_is_read_again(engine: Engine, tmp_path: Path) -> None:
    talk = full(engine)
    talk.make_room(100)
    dropped = talk.unsent
    talk.save(tmp_path / "talk.json")
    loaded = engine.conversation()
    loaded.load(tmp_path / "talk.json")
    assert loaded.unsent == dropped == talk.fork().unsent and loaded.messages == talk.messages
    assert loaded.tokens == talk.tokens
    while len(talk.messages) > dropped:
        assert talk.unsent == dropped
        talk.undo()
    assert talk.unsent == 0, "what is left would be unsent as a whole"
    loaded.clear()
    assert loaded.unsent == 0


def test_one_of_several_answers_is_chosen(engine: Engine) -> None:
    talk = engine.conversation(params=SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, n=3))
    first = talk.ask("one")
    assert [m["content"] for m in talk.messages] == ["one", first.text]
    chosen = first.others[1]
    assert chosen.text != first.text
    talk.choose(chosen)
    assert [m["content"] for m in talk.messages] == ["one", chosen.text]
    second = talk.ask("two")
    assert second.usage.cached_tokens >= chosen.usage.total_tokens - 8, "the very tokens of the chosen answer"
    with pytest.raises(InvalidRequest, match="no answer of the last turn"):
        talk.choose(chosen)
    talk.undo()
    with pytest.raises(InvalidRequest, match="no answer of the last turn"):
        talk.choose(second)


def test_it_goes_on_with_another_engine(engine: Engine, tiny: Any) -> None:
    talk = full(engine)
    talk.make_room(100)
    with (
        Engine(tiny("one layer"), kv_memory="1MB", block_size=8) as more,
        Engine(tiny("gemma3_text"), block_size=8) as other,
    ):
        for each in (more, other):
            moved = talk.fork(each)
            assert moved.messages == talk.messages and moved.unsent == 0 and moved.system == talk.system
            moved.clear()
            moved.ask("one")
        assert talk.fork(more)._transcript == talk._transcript
        assert talk.fork(other)._transcript.tokens == ()
