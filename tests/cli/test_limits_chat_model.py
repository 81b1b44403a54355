"""A chat with the starter model in little memory: it goes on, and its answers are those of the turns that are left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.view import RawView

pytestmark = pytest.mark.model

ASIDE = "I have been to the sea this summer, and saw a great many of them, large ones and small ones, every day."


@pytest.fixture
def engine() -> Iterator[Engine]:
    """About 260 tokens."""
    with Engine("smollm2", kv_memory="12MB") as opened:
        yield opened


def test_a_full_cache_never_ends_the_chat(engine: Engine) -> None:
    told: list[str] = []
    params = SamplingParams(max_tokens=8)
    session = ChatSession(engine, lambda reply: RawView(), engine.conversation(params=params), note=told.append)
    for number in range(6):
        completion = session.ask(Question(f"{ASIDE} Name {number + 2} animals of the sea, please."))
        assert completion.usage.total_tokens <= engine.longest_request
    talk = session.conversation
    assert told and all("the KV memory of 11.2 MiB (257 tokens) is full" in note for note in told)
    assert "/set kv_memory SIZE gives it more (11.2 MiB now)" in told[0]
    assert len(talk.messages) == 12 and 0 < talk.unread < 12
    rest = engine.conversation(messages=talk.messages[talk.unread : -2], params=params)
    assert rest.ask(str(talk.messages[-2]["content"])).text == completion.text
