"""What the bodies of the OpenAI API share: sampling, the form of an answer, and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib._parsing._completions import type_to_response_format_param
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from cortexmlx import Completion, FinishReason, SamplingParams, Timings, TokenEvent, Usage
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.batch import PROTOCOLS, LineStyle
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.openai.parameters import body_variables, merge_variables, read_tools
from cortexmlx.protocols.request import ReplyInfo, Request, RequestDefaults
from cortexmlx.protocols.responses import LOGPROBS
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.tools import CallDelta, ToolCall

DEFAULTS = SamplingParams(max_tokens=99, temperature=0.5)
ASKED: dict[LineStyle, dict[str, Any]] = {
    LineStyle.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    LineStyle.COMPLETIONS: {"prompt": "hi"},
    LineStyle.RESPONSES: {"input": "hi"},
    LineStyle.SIMPLE: {"prompt": "hi"},
}


def params_of(said: dict[str, Any], style: LineStyle) -> SamplingParams:
    return PROTOCOLS[style].read({**ASKED[style], **said}, RequestDefaults(DEFAULTS)).params


@pytest.mark.parametrize(
    ("said", "style", "changed"),
    [
        ({}, LineStyle.CHAT, {}),
        ({"max_tokens": 3, "max_completion_tokens": 5}, LineStyle.CHAT, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 3}, LineStyle.SIMPLE, {"max_tokens": 5}),
        (
            {"temp": 0.1, "stop": "x", "logit_bias": {"4": 1}},
            LineStyle.SIMPLE,
            {"temperature": 0.1, "stop": ("x",), "logit_bias": {4: 1}},
        ),
        ({"logprobs": True, "top_logprobs": 4}, LineStyle.CHAT, {"logprobs": 4}),
        ({"logprobs": True}, LineStyle.CHAT, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 0}, LineStyle.CHAT, {}),
        ({"logprobs": 4}, LineStyle.COMPLETIONS, {"logprobs": 4}),
        ({"max_tokens": 5.0, "top_k": -1.0, "seed": 3.0}, LineStyle.CHAT, {"max_tokens": 5, "seed": 3}),
        ({"max_output_tokens": 5}, LineStyle.RESPONSES, {"max_tokens": 5}),
        ({"include": [LOGPROBS], "top_logprobs": 2}, LineStyle.RESPONSES, {"logprobs": 2}),
    ],
)
def test_what_a_line_says_goes_before_the_defaults(
    said: dict[str, Any], style: LineStyle, changed: dict[str, Any]
) -> None:
    expected = SamplingParams(**{"max_tokens": 99, "temperature": 0.5, **changed})
    assert params_of(said, style) == expected


@pytest.mark.parametrize(
    ("said", "style", "says"),
    [
        ({"logprobs": 2}, LineStyle.CHAT, "logprobs is 2, but must be true or false: the number is `top_logprobs`"),
        ({"top_logprobs": 2}, LineStyle.CHAT, 'top_logprobs needs "logprobs": true'),
        ({"top_logprobs": 2}, LineStyle.RESPONSES, f'top_logprobs needs "include": ["{LOGPROBS}"]'),
        ({"include": ["reasoning.encrypted_content"]}, LineStyle.RESPONSES, "but only"),
        ({"include": 1}, LineStyle.RESPONSES, "include is 1, but must be a list"),
        ({"temp": 1, "temperature": 2}, LineStyle.SIMPLE, "there are both 'temp' and 'temperature'"),
        ({"logprobs": True}, LineStyle.COMPLETIONS, "logprobs is True"),
        ({"logit_bias": {"a": 1}}, LineStyle.CHAT, "but must be an object from token ids to numbers"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, Any], style: LineStyle, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params_of(said, style)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {}),
        ({"reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "a": None}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_a_body_asks_for_variables_as_vllms_or_openais(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert body_variables(body) == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {"enable_thinking": True, "a": 1}),
        ({"chat_template_kwargs": {"a": None}}, {"enable_thinking": True, "a": 1}),
        ({"chat_template_kwargs": {"a": 2}}, {"enable_thinking": True, "a": 2}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False, "a": 1}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "a": 1, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"a": 1, "reasoning_effort": "none"}),
    ],
)
def test_what_a_body_says_goes_over_what_is_usual(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    """No effort is a switch, too, which a usual one must not turn back."""
    assert merge_variables(body_variables(body), {"enable_thinking": True, "a": 1}) == wanted


# Forms in bodies: OpenAI's and vLLM's, in every protocol; what is no form is refused with its path.


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
FORM = StructuredOutput.json(SCHEMA)
LENIENT = StructuredOutput.json(SCHEMA, lenient=True)


def chat(defaults: SamplingParams | None = None, **body: Any) -> Request:
    asked = {"messages": [{"role": "user", "content": "hi"}], **body}
    return chat_completions.read(asked, RequestDefaults(defaults or SamplingParams()))


def respond(**text: Any) -> Request:
    return responses.read({"input": "hi", "text": text}, RequestDefaults(SamplingParams()))


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput.json()),
        (named(), FORM),
        (named(strict=True, description="y"), StructuredOutput.json(SCHEMA, closed=True)),
        (named(strict=None), FORM),
        (named(strict=False), LENIENT),
        ({"type": "json_object", "schema": SCHEMA}, FORM),
        ({"type": "json_schema", "schema": SCHEMA}, FORM),
    ],
)
def test_a_response_format(asked: dict[str, Any], form: StructuredOutput | None) -> None:
    assert chat(response_format=asked).params.form == form
    assert chat(SamplingParams(structured="json"), response_format=asked).params.form == form
    body = {"prompt": "hi", "response_format": asked}
    assert completions.read(body, RequestDefaults(SamplingParams())).params.form == form
    assert simple.read(body, RequestDefaults(SamplingParams())).params.form == form


def test_what_a_body_does_not_say_is_the_default() -> None:
    assert chat(SamplingParams(structured=SCHEMA)).params.form == FORM
    assert chat(SamplingParams(structured=SCHEMA), response_format=None).params.form == FORM
    assert chat().params.form is None


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"json": SCHEMA}, FORM),
        ({"json": '{"type": "object", "properties": {"b": {}, "a": {}}}'}, FORM),
        ({"json": SCHEMA, "lenient": True, "regex": None}, LENIENT),
        ({"json": SCHEMA, "disable_any_whitespace": True}, StructuredOutput.json(SCHEMA, compact=True)),
        ({"json": SCHEMA, "disable_additional_properties": True}, StructuredOutput.json(SCHEMA, closed=True)),
        ({"regex": "a+"}, StructuredOutput.regex("a+")),
        ({"choice": ["a", "b"]}, StructuredOutput.choice(["a", "b"])),
        ({"grammar": 'start: "a"'}, StructuredOutput.grammar('start: "a"')),
        ({"json_object": True}, StructuredOutput.json()),
    ],
)
def test_vllms_structured_outputs(asked: dict[str, Any], form: StructuredOutput) -> None:
    assert chat(structured_outputs=asked).params.form == form
    if len(asked) == 1 and asked.keys() < {"json", "regex", "choice", "grammar"}:
        assert chat(**{f"guided_{name}": value for name, value in asked.items()}).params.form == form
    body = {"prompt": "hi", "structured_outputs": asked}
    assert simple.read(body, RequestDefaults(SamplingParams())).params.form == form


def test_a_responses_format() -> None:
    assert respond().params.form is None
    assert respond(format={"type": "text"}, verbosity="high").params.form is None
    assert respond(format={"type": "json_object"}).params.form == StructuredOutput.json()
    assert respond(format={"type": "json_schema", "name": "x", "schema": SCHEMA}).params.form == FORM
    lenient = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": False}
    assert respond(format=lenient).params.form == LENIENT


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ({"format": {"type": "json_schema"}}, "text.format.schema"),
        ({"format": {"type": "xml"}}, "text.format.type"),
        ({"format": 5}, "text.format"),
        ({"form": {}}, "text.form"),
        ({"verbosity": "loud"}, "text.verbosity"),
    ],
)
def test_what_is_no_text_of_a_response_is_refused_with_its_path(text: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        respond(**text)
    assert refused.value.field == field


def test_what_openais_library_sends_for_a_type_is_a_form() -> None:
    class City(BaseModel):
        name: str
        people: int

    asked: Any = type_to_response_format_param(City)
    form = chat(response_format=asked).params.form
    assert form is not None and form.as_mapping()["json"]["properties"].keys() == {"name", "people"}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"response_format": 5}, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        ({"response_format": named(schema=5)}, "response_format.json_schema.schema", "must be a JSON schema"),
        ({"response_format": named(strict="yes")}, "response_format.json_schema.strict", "true or false"),
        ({"response_format": named(x=1)}, "response_format.json_schema.x", "unknown field"),
        ({"response_format": named(schema={"a": "x" * 2_000_000})}, "response_format.json_schema.schema", "at most"),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list of texts"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}},
            "structured_outputs.disable_any_whitespace",
            "true or false",
        ),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "text"}},
            "structured_outputs",
            "give one of them",
        ),
        ({"structured": SCHEMA}, "structured", "unknown field"),
    ],
)
def test_what_is_no_form_is_refused_with_its_path(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        chat(**body)
    assert refused.value.field == field


# Tools in bodies: the OpenAI package takes what is written, and the calls come back as they were.


USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}
RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": None}
CALLS = (ToolCall("call_a", "weather", '{"city": "Rome"}'), ToolCall("call_b", "weather", '{"city":"Oslo"}'))
INFO = ReplyInfo("1", "model", 1, lambda token: b"")
PLAIN = RequestDefaults(SamplingParams())


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


def chat_with_tools(**more: Any) -> Any:
    return chat_completions.read({"messages": [USER], "tools": [CHAT_TOOL], **more}, PLAIN)


def test_the_tools_of_a_body_are_those_of_the_request() -> None:
    params = chat_with_tools(tool_choice="required", parallel_tool_calls=False).params
    assert [tool.as_mapping() for tool in params.offered] == [CHAT_TOOL]
    assert (params.tool_choice, params.parallel_tool_calls) == ("required", False)
    named = {"type": "function", "function": {"name": "weather"}}
    assert chat_with_tools(tool_choice=named).params.tool_choice == "weather"
    body = {"input": "hi", "tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    said = responses.read(body, PLAIN).params
    assert said.offered == params.offered and said.tool_choice == "weather"
    assert simple.read({"prompt": "hi", "tools": [CHAT_TOOL]}, PLAIN).params.offered == params.offered


def test_a_body_without_tools_has_none() -> None:
    assert read_tools({}) == {}
    assert chat_completions.read({"messages": [USER], "tools": []}, PLAIN).params.offered == ()


@pytest.mark.parametrize("text", ["", "Let me look."])
def test_the_openai_package_reads_the_calls_of_a_message(text: str) -> None:
    body = chat_completions.write(chat_with_tools(), [[completion(text)]], INFO)
    [choice] = ChatCompletion.model_validate(body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (text or None)
    called = choice.message.tool_calls or []
    assert [(c.id, c.function.name, c.function.arguments) for c in called if c.type == "function"] == [
        (call.id, call.name, call.arguments) for call in CALLS
    ]
    again = chat_completions.read({"messages": [USER, body["choices"][0]["message"]]}, PLAIN)
    said = again.prompts[0][1]
    assert isinstance(said, dict) and said["tool_calls"] == [call.as_mapping() for call in CALLS]


def test_the_openai_package_puts_streamed_calls_together() -> None:
    request = chat_with_tools(stream=True)
    chunks = chat_completions.ChatChunks(request, INFO)
    events = [TokenEvent("Let me ", 1), TokenEvent("look.", 2)]
    for number, call in enumerate(CALLS):
        events.append(TokenEvent("", 3, tool_calls=(CallDelta(number, call.id, call.name),)))
        events += [TokenEvent("", 4, tool_calls=(CallDelta(number, arguments=char),)) for char in call.arguments]
    events.append(TokenEvent("", finish_reason=FinishReason.TOOL_CALLS, completion=completion("Let me look.")))
    said = [chunk for event in events[:-1] for chunk in chunks.convert(event)]
    pieces = [piece for chunk in said for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert len(pieces) == len(events) - 3
    chunks, state = chat_completions.ChatChunks(request, INFO), ChatCompletionStreamState()
    for event in events:
        for chunk in chunks.convert(event):
            state.handle_chunk(ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk))))
    [choice] = state.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    called = choice.message.tool_calls or []
    assert [(c.id, c.function.name, c.function.arguments) for c in called] == [
        (call.id, call.name, call.arguments) for call in CALLS
    ]


def test_what_no_chunk_has_said_comes_at_the_end() -> None:
    chunks = chat_completions.ChatChunks(chat_with_tools(stream=True), INFO)
    said = chunks.convert(TokenEvent("", completion=completion("Text"), finish_reason=FinishReason.TOOL_CALLS))
    deltas = [chunk["choices"][0]["delta"] for chunk in said]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Text"
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [(c.id, c.arguments) for c in CALLS]


def test_responses_have_an_item_for_each_call() -> None:
    request = responses.read({"input": "hi", "tools": [RESPONSE_TOOL]}, PLAIN)
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
    [messages] = responses.read({"input": items}, PLAIN).prompts
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "Let me look."
    assert messages[1]["tool_calls"] == [call.as_mapping() for call in CALLS]
    assert messages[2] == {"role": "tool", "tool_call_id": "call_a", "content": "sun"}


def test_our_own_object_has_the_calls() -> None:
    request = simple.read({"prompt": "hi", "tools": [CHAT_TOOL]}, PLAIN)
    said = simple.write(request, [[completion()]], INFO)
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["weather", "weather"]
    assert "tool_calls" not in simple.write(request, [[completion("x", ())]], INFO)
