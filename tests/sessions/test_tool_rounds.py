"""A question that functions help to answer: what runs, what the model reads, and what is kept if it fails."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, FinishReason, InvalidRequest, RequestTimeout, SamplingParams, Tool, ToolEvent
from cortexmlx.errors import LogitsProcessorError, StructuredOutputError
from cortexmlx.sessions.tool_rounds import NOT_ALLOWED, ToolRounds
from cortexmlx.structured.tools import ToolCall
from support.models.calling import write_calling
from support.models.thinking import dictated
from support.patience import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling(tmp_path_factory.mktemp("calling") / "m", "hermes")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), kv_memory="8MB", max_rows=2) as opened:
        yield opened
        opened.check_invariants()


def weather(city: str, days: int = 1) -> dict[str, object]:
    """The weather of a city."""
    if city == "Atlantis":
        raise LookupError("no such city")
    return {"city": city, "degrees": 14 + days}


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def roles(talk: Any) -> list[object]:
    return [message["role"] for message in talk.messages]


def test_functions_run_until_there_is_an_answer(engine: Engine) -> None:
    talk = engine.conversation()
    first = f"Let me look.\n{call('weather', city='Paris')}\n{call('weather', city='Rome', days=3)}"
    said = dictated(engine, first, call("weather", city="Oslo"), "It is warm.")
    events: list[ToolEvent] = []
    answer = talk.ask("Is it warm?", said, tools=[weather], on_event=events.append)
    assert (answer.text, answer.finish_reason, answer.tool_calls) == ("It is warm.", FinishReason.STOP, ())
    assert roles(talk) == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    results = [json.loads(str(message["content"])) for message in talk.messages if message["role"] == "tool"]
    assert [(each["city"], each["degrees"]) for each in results] == [("Paris", 15), ("Rome", 17), ("Oslo", 15)]
    assert talk.messages[1]["content"] == "Let me look."
    told = [(event.call.values["city"], event.result is None) for event in events]
    assert told == [(city, begins) for city in ("Paris", "Rome", "Oslo") for begins in (True, False)]
    ids = [message["tool_call_id"] for message in talk.messages if message["role"] == "tool"]
    assert ids == [event.call.id for event in events if event.result is None] and len(set(ids)) == 3


def test_a_coroutine_runs_in_the_callers_event_loop_and_a_function_beside_it(engine: Engine) -> None:
    ran: list[object] = []

    async def slowly(city: str) -> str:
        await asyncio.sleep(0)
        ran.append(asyncio.get_running_loop())
        return city

    def quickly(city: str) -> str:
        ran.append(threading.current_thread())
        return city

    async def allowed(call: ToolCall) -> bool:
        await asyncio.sleep(0)
        return True

    async def talk() -> str:
        conversation = engine.conversation()
        said = dictated(engine, call("slowly", city="a") + "\n" + call("quickly", city="b"), "Done.")
        answer = await conversation.aask("?", said, tools=[slowly, quickly], approve=allowed)
        assert [m["content"] for m in conversation.messages if m["role"] == "tool"] == ["a", "b"]
        assert ran[0] is asyncio.get_running_loop() and ran[1] is not threading.current_thread()
        return answer.text

    assert asyncio.run(talk()) == "Done."


def test_the_model_reads_errors_and_refusals(engine: Engine) -> None:
    talk = engine.conversation()
    calls = "\n".join(call("weather", city=city) for city in ("Atlantis", "Rome", "Paris"))
    talk.ask("?", dictated(engine, calls, "So."), tools=[weather], approve=lambda call: call.values["city"] != "Rome")
    results = [message["content"] for message in talk.messages if message["role"] == "tool"]
    assert results == ["Error: LookupError: no such city", NOT_ALLOWED, '{"city":"Paris","degrees":15}']


@pytest.mark.parametrize(("rounds", "ran"), [(1, 1), (2, 2), (3, 3)])
def test_after_the_last_round_the_model_is_held_to_an_answer(rounds: int, ran: int, engine: Engine) -> None:
    """What writes only calls is left without a token, since the last round allows no trigger of a call."""
    talk = engine.conversation()
    seen: list[str] = []

    def note(text: str) -> str:
        seen.append(text)
        return "noted"

    said = dictated(engine, call("note", text="a"))
    with pytest.raises(StructuredOutputError, match="no token is left to choose"):
        talk.ask("?", said, tools=[note], max_rounds=rounds)
    assert len(seen) == ran and talk.messages == ()


def test_a_choice_that_requires_a_call_is_for_the_first_round(engine: Engine) -> None:
    talk = engine.conversation()
    said = dictated(engine, call("weather", city="Rome"), "Warm.")
    assert talk.ask("?", said, tools=[weather], tool_choice="required").text == "Warm."
    rounds = ToolRounds(SamplingParams(tools=[weather], tool_choice="required"), max_rounds=2)
    assert rounds.params.tool_choice == "required"
    answer = talk.ask("?", dictated(engine, "No."))
    rounds.run_calls(answer, None)
    assert rounds.params.tool_choice == "auto"
    rounds.run_calls(answer, None)
    assert rounds.params.tool_choice == "none"


def test_a_turn_that_fails_in_a_later_round_leaves_no_trace(engine: Engine) -> None:
    talk = engine.conversation()
    before = talk.ask("Hello", dictated(engine, "Hi."))
    messages = talk.messages

    class Pressed(BaseException):
        """As Ctrl-C."""

    def fails(kind: str) -> str:
        if kind == "pressed":
            raise Pressed
        ran.append(kind)
        return kind

    ran: list[str] = []

    def broken(tokens: Any, logits: Any) -> Any:
        if ran:
            raise ValueError("broken")
        return logits

    with pytest.raises(Pressed):
        talk.ask("?", dictated(engine, call("fails", kind="pressed")), tools=[fails])
    said = dictated(engine, call("fails", kind="fine"), "So.")
    said = replace(said, logits_processors=[*said.logits_processors, broken])
    with pytest.raises(LogitsProcessorError):
        talk.ask("?", said, tools=[fails])
    assert ran == ["fine"]
    with pytest.raises(RequestTimeout):
        talk.ask("?", dictated(engine, call("fails", kind="fine"), "x" * 400), tools=[fails], timeout=1e-9)
    assert talk.messages == messages
    again = talk.ask("and?", dictated(engine, "Yes."))
    assert again.usage.cached_tokens >= before.usage.prompt_tokens - 32 and talk.messages[:2] == messages


def test_in_asyncio_a_function_that_hangs_ends_with_the_questions_time(engine: Engine) -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    async def refuses(call: ToolCall) -> bool:
        raise TimeoutError("of approve's own")

    talk, said = engine.conversation(), dictated(engine, call("hangs"), "So.")
    with pytest.raises(RequestTimeout, match="a function still ran"):
        asyncio.run(asyncio.wait_for(talk.aask("?", said, tools=[hangs], timeout=5), PATIENCE))
    with pytest.raises(TimeoutError, match="of approve's own"):
        asyncio.run(talk.aask("?", said, tools=[hangs], approve=refuses, timeout=PATIENCE))
    assert talk.messages == ()


def test_nothing_else_is_asked_or_changed_while_functions_run(engine: Engine) -> None:
    talk = engine.conversation()
    refused: list[str] = []

    def meddle(text: str) -> str:
        ask = partial(talk.ask, "another?")
        for change in (partial(ask, tools=[weather]), ask, talk.undo, talk.clear, partial(talk.edit, 0, text)):
            with pytest.raises(InvalidRequest, match="is being answered"):
                change()
            refused.append(text)
        return str(len(talk.fork().messages))

    assert talk.ask("?", dictated(engine, call("meddle", text="a"), "So."), tools=[meddle]).text == "So."
    said = dictated(engine, call("meddle", text="b"), "So.")
    assert asyncio.run(talk.aask("and?", said, tools=[meddle])).text == "So."
    assert refused == ["a"] * 5 + ["b"] * 5 and roles(talk) == ["user", "assistant", "tool", "assistant"] * 2
    talk.undo()


def test_undo_and_regenerate_know_a_turn_with_calls(engine: Engine) -> None:
    talk = engine.conversation()
    talk.ask("one", dictated(engine, "1"))
    talk.ask("two", dictated(engine, call("weather", city="Rome"), "2"), tools=[weather])
    assert talk.regenerate(dictated(engine, "zwei")).text == "zwei", "the same results, another answer"
    assert roles(talk) == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert talk.undo() == ({"role": "user", "content": "two"},)
    assert [message["content"] for message in talk.messages] == ["one", "1"]


def test_a_conversation_with_calls_is_saved_loaded_and_read(engine: Engine, tmp_path: Path) -> None:
    talk = engine.conversation()
    talk.ask("two", dictated(engine, call("weather", city="Rome"), "2"), tools=[weather])
    talk.save(tmp_path / "talk.json")
    other = engine.conversation()
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages and other.tokens == talk.tokens
    assert 'weather({"city": "Rome"})' in talk.markdown() and '{"city":"Rome","degrees":15}' in talk.markdown()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [Tool.named("f")]}, "the tool 'f' has no function to run"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the tool 'f' has no function to run"),
        ({"tools": [weather], "max_rounds": 0}, "max_rounds is 0"),
        ({"tools": [weather], "max_rounds": True}, "max_rounds is True"),
        ({"tools": [weather], "timeout": "5"}, "timeout is '5'"),
        ({"tools": [weather], "timeout": -1}, "timeout is -1"),
        ({"tools": [weather], "params": SamplingParams(n=2)}, "n is 2, but functions are run for one answer"),
        ({"tools": [weather, weather]}, "two tools are called 'weather'"),
        ({"tools": [print]}, "the function print cannot be a tool"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_asked(
    options: dict[str, Any], says: str, engine: Engine
) -> None:
    talk = engine.conversation()
    with pytest.raises(InvalidRequest, match=says):
        talk.ask("?", **options)
    assert talk.messages == ()


def test_without_tools_of_the_question_nothing_runs(engine: Engine) -> None:
    """Tools of the sampling parameters are offered, and their calls are the caller's to run."""
    talk = engine.conversation()
    answer = talk.ask("?", dictated(engine, call("weather", city="Atlantis"), tools=[weather]))
    assert [each.name for each in answer.tool_calls] == ["weather"] and roles(talk) == ["user", "assistant"]
