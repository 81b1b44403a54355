"""Bodies of `/api/chat` and `/api/generate`, and the lines of their streams, which say the same as a whole reply."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.ollama import chat, generate
from cortexmlx.protocols.request import ReplyInfo, RequestDefaults
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.tools import ToolCall
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support.told_answers import events

PLAIN = RequestDefaults(SamplingParams(max_tokens=None))
INFO = ReplyInfo("7", "m", 1, lambda token: b"", load_seconds=2.0)
USER = {"role": "user", "content": "Hello?"}


def asked(**fields: Any) -> Any:
    return chat.read({"messages": [USER], **fields}, PLAIN)


@st.composite
def answers(draw: Any) -> tuple[Completion, list[TokenEvent]]:
    arguments = st.dictionaries(st.text("ab", min_size=1), st.integers() | st.text(max_size=3), max_size=2)
    calls = [ToolCall(f"c{n}", "f", json.dumps(draw(arguments))) for n in range(draw(st.integers(0, 2)))]
    text, thinking = draw(st.text(max_size=9)), draw(st.text(max_size=9))
    reason = FinishReason.TOOL_CALLS if calls else draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    answer = Completion(
        text, (1, 2), reason, Usage(5, 2), Timings(0.5, 1.5, 4.0, 0, 0), thinking=thinking, tool_calls=tuple(calls)
    )
    return answer, list(events(draw, answer))


@given(answers())
def test_the_lines_of_a_stream_say_what_a_whole_reply_says(drawn: tuple[Completion, list[TokenEvent]]) -> None:
    answer, told = drawn
    for module, lines_class in ((chat, chat.ChatLines), (generate, generate.GenerateLines)):
        request = module.read({"messages": [USER]} if module is chat else {"prompt": "Hello?"}, PLAIN)
        writer = lines_class(request, INFO)
        lines = [line for event in told for line in writer.convert(event)]
        whole = module.write(request, [[answer]], INFO)
        parts = [line.get("message", line) for line in lines]
        said = whole.get("message", whole)
        assert [call for part in parts for call in part.get("tool_calls", [])] == said.get("tool_calls", [])
        for name in ("content", "response", "thinking"):
            assert "".join(part.get(name, "") for part in parts) == said.get(name, "")
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        last = {name: value for name, value in lines[-1].items() if name not in ("created_at", "message", "response")}
        assert last == {name: value for name, value in whole.items() if name in last}
        assert (last["load_duration"], last["total_duration"]) == (2_000_000_000, 6_000_000_000)
        assert (last["prompt_eval_duration"], last["eval_duration"]) == (1_000_000_000, 2_500_000_000)
        assert last["done_reason"] == ("length" if answer.finish_reason is FinishReason.LENGTH else "stop")


def test_a_form_is_json_or_a_schema() -> None:
    assert asked(format="json").params.form == StructuredOutput.json()
    assert asked(format="").params.form is asked(format=None).params.form is None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert asked(format=schema).params.form == StructuredOutput.json(schema, lenient=True, closed=True)
    for wrong in ("yaml", 1, [schema]):
        with pytest.raises(InvalidRequest, match="format is") as raised:
            asked(format=wrong)
        assert raised.value.field == "format"


def test_messages_are_read_as_those_of_the_openai_api() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    said = [
        {"role": "User", "content": "Hello?", "tool_calls": None},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "1"},
    ]
    [prompt] = chat.read({"messages": said}, PLAIN).prompts
    assert prompt == [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "f"},
    ]


def test_images_come_before_the_text_or_a_line_stands_for_them() -> None:
    seeing = RequestDefaults(PLAIN.params, check_image=lambda data: None)
    for read, body in (
        (chat.read, {"messages": [{**USER, "images": ["AAEC"]}]}),
        (generate.read, {"prompt": "Hello?", "images": ["AAEC"]}),
    ):
        [[seen]] = read(body, seeing).prompts
        image = {"type": "image", "image": b"\0\1\2"}
        assert seen["content"] == [image, {"type": "text", "text": "Hello?"}]
        blind = read(body, PLAIN)
        assert "[An image was here" in blind.prompts[0][0]["content"] and blind.notes
    for wrong in ("AAEC", [1], ["data:image/png;base64,AAEC"], ["?"]):
        with pytest.raises(InvalidRequest, match="base64"):
            chat.read({"messages": [{**USER, "images": wrong}]}, seeing)


def test_a_body_streams_unless_it_says_otherwise_and_asks_for_one_answer() -> None:
    many = RequestDefaults(SamplingParams(n=3, best_of=4))
    assert asked().stream and asked(stream=None).stream and not asked(stream=False).stream
    params = chat.read({"messages": [USER], "options": None}, many).params
    assert (params.n, params.best_of) == (1, None)


def test_numbers_without_a_limit_are_none() -> None:
    for unlimited in (-2, -1, 0):
        assert asked(options={"num_predict": unlimited}).params.max_tokens is None
    assert asked(options={"num_predict": 7.0, "seed": -1.0, "top_k": -1}).params == SamplingParams(max_tokens=7)
    back = asked(options={"repeat_penalty": 2.0, "repeat_last_n": -1}).params
    assert back.repetition_penalty == 2.0 and back.repetition_context > 1_000_000
    assert asked(options={"repeat_penalty": 2.0, "repeat_last_n": 0}).params.repetition_penalty == 1.0


def test_a_level_of_thoughts_is_a_switch_where_there_are_no_levels() -> None:
    def variables(think: object, *names: str) -> Any:
        return chat.read({"messages": [USER], "think": think}, replace(PLAIN, known_vars=frozenset(names)))

    assert variables("low", "reasoning_effort").template_vars == {"reasoning_effort": "low"}
    switched = variables("low", "enable_thinking")
    assert switched.template_vars == {"enable_thinking": True} and not switched.notes
    assert variables(False, "thinking").template_vars == {"thinking": False}
    assert variables(True).notes
