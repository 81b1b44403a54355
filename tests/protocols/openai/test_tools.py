"""Tools in bodies: the OpenAI package takes what is written, and the calls come back as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseFunctionToolCall

from cortexmlx import Completion, FinishReason, SamplingParams, Timings, TokenEvent, Usage
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.openai import chat_completions
from cortexmlx.protocols.openai.parameters import tool_values
from cortexmlx.protocols.request import Defaults, ReplyInfo
from cortexmlx.structured.tools import CallDelta, ToolCall

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}
RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": None}
CALLS = (ToolCall("call_a", "weather", '{"city": "Rome"}'), ToolCall("call_b", "weather", '{"city":"Oslo"}'))
INFO = ReplyInfo("1", "model", 1, lambda token: b"")
DEFAULTS = Defaults(SamplingParams())


def completion(text: str = "", calls: tuple[ToolCall, ...] = CALLS, thinking: str = "") -> Completion:
    return Completion(
        text,
        (1, 2),
        FinishReason.TOOL_CALLS if calls else FinishReason.STOP,
        Usage(3, 2),
        Timings(0, 0, 0, 0, 0),
        tool_calls=calls,
        thinking=thinking,
    )


def chat(**more: Any) -> Any:
    return chat_completions.read({"messages": [USER], "tools": [CHAT_TOOL], **more}, DEFAULTS)


def test_the_tools_of_a_body_are_those_of_the_request() -> None:
    params = chat(tool_choice="required", parallel_tool_calls=False).params
    assert [tool.as_mapping() for tool in params.offered] == [CHAT_TOOL]
    assert (params.tool_choice, params.parallel_tool_calls) == ("required", False)
    named = {"type": "function", "function": {"name": "weather"}}
    assert chat(tool_choice=named).params.tool_choice == "weather"
    body = {"input": "hi", "tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    said = responses.read(body, DEFAULTS).params
    assert said.offered == params.offered and said.tool_choice == "weather"
    assert simple.read({"prompt": "hi", "tools": [CHAT_TOOL]}, DEFAULTS).params.offered == params.offered


def test_a_body_without_tools_has_none() -> None:
    assert tool_values({}) == {}
    assert chat_completions.read({"messages": [USER], "tools": []}, DEFAULTS).params.offered == ()


@pytest.mark.parametrize("text", ["", "Let me look."])
def test_the_openai_package_reads_the_calls_of_a_message(text: str) -> None:
    body = chat_completions.write(chat(), [[completion(text)]], INFO)
    [choice] = ChatCompletion.model_validate(body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (text or None)
    called = choice.message.tool_calls or []
    assert [(c.id, c.function.name, c.function.arguments) for c in called if c.type == "function"] == [
        (call.id, call.name, call.arguments) for call in CALLS
    ]
    again = chat_completions.read({"messages": [USER, body["choices"][0]["message"]]}, DEFAULTS)
    said = again.prompts[0][1]
    assert isinstance(said, dict) and said["tool_calls"] == [call.as_mapping() for call in CALLS]


def test_the_openai_package_puts_streamed_calls_together() -> None:
    request = chat(stream=True)
    chunks = chat_completions.ChatChunks(request, INFO)
    events = [TokenEvent("Let me ", 1), TokenEvent("look.", 2)]
    for number, call in enumerate(CALLS):
        events.append(TokenEvent("", 3, tool_calls=(CallDelta(number, call.id, call.name),)))
        events += [TokenEvent("", 4, tool_calls=(CallDelta(number, arguments=char),)) for char in call.arguments]
    events.append(TokenEvent("", finish_reason=FinishReason.TOOL_CALLS, completion=completion("Let me look.")))
    said = [chunk for event in events[:-1] for chunk in chunks.of(event)]
    pieces = [piece for chunk in said for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert len(pieces) == len(events) - 3
    chunks, state = chat_completions.ChatChunks(request, INFO), ChatCompletionStreamState()
    for event in events:
        for chunk in chunks.of(event):
            state.handle_chunk(ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk))))
    [choice] = state.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    called = choice.message.tool_calls or []
    assert [(c.id, c.function.name, c.function.arguments) for c in called] == [
        (call.id, call.name, call.arguments) for call in CALLS
    ]


def test_what_no_chunk_has_said_comes_at_the_end() -> None:
    chunks = chat_completions.ChatChunks(chat(stream=True), INFO)
    said = chunks.of(TokenEvent("", completion=completion("Text"), finish_reason=FinishReason.TOOL_CALLS))
    deltas = [chunk["choices"][0]["delta"] for chunk in said]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Text"
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [(c.id, c.arguments) for c in CALLS]


def test_responses_have_an_item_for_each_call() -> None:
    request = responses.read({"input": "hi", "tools": [RESPONSE_TOOL]}, DEFAULTS)
    body = responses.write(request, [[completion(thinking="Hm")]], INFO)
    reply = Response.model_validate(body)
    assert [item.type for item in reply.output] == ["reasoning", "function_call", "function_call"]
    calls = [item for item in reply.output if isinstance(item, ResponseFunctionToolCall)]
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [(c.id, c.name, c.arguments) for c in CALLS]
    with_text = responses.write(request, [[completion("Text")]], INFO)
    assert [item["type"] for item in with_text["output"]] == ["message", "function_call", "function_call"]


def test_calls_and_their_outputs_are_messages_again() -> None:
    items = [
        USER,
        {"role": "assistant", "content": "Let me look."},
        *(
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in CALLS
        ),
        *({"type": "function_call_output", "call_id": call.id, "output": "sun"} for call in CALLS),
    ]
    [messages] = responses.read({"input": items}, DEFAULTS).prompts
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "Let me look."
    assert messages[1]["tool_calls"] == [call.as_mapping() for call in CALLS]
    assert messages[2] == {"role": "tool", "tool_call_id": "call_a", "content": "sun"}


def test_our_own_object_has_the_calls() -> None:
    request = simple.read({"prompt": "hi", "tools": [CHAT_TOOL]}, DEFAULTS)
    said = simple.write(request, [[completion()]], INFO)
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["weather", "weather"]
    assert "tool_calls" not in simple.write(request, [[completion("x", ())]], INFO)
