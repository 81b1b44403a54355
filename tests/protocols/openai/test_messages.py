"""Messages as others write them: read, or refused by name with their number."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import chat
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.history import INVALID_JSON
from cortexmlx.protocols.openai.messages import read_messages

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def test_calls_of_tools_come_without_content_and_with_their_arguments_as_an_object() -> None:
    said = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}]
    said.append({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]})
    _, called, told = read_messages(said)
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert called == {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
    assert told == {"role": "tool", "tool_call_id": "1", "content": "sun"}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        *((none, {}) for none in (None, "", " ", "{}", "null", {})),
        ('{"city": "Ro', {INVALID_JSON: '{"city": "Ro'}),
        ("[1]", {INVALID_JSON: "[1]"}),
        ([1], {INVALID_JSON: "[1]"}),
        ("[" * 9999, {INVALID_JSON: "[" * 9999}),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", {INVALID_JSON: '{"a": ' + "[" * 200 + "]" * 200 + "}"}),
        ('{"a": ["\\ud83d", {"\\u0000": "\\ud83d\\ude00"}]}', {"a": ["\ufffd", {"\ufffd": "😀"}]}),
    ],
)
def test_arguments_that_are_no_json_object_are_kept_as_a_text(arguments: Any, read: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}, "index": 0, "cache_control": {}}
    [called] = read_messages([{"role": "assistant", "tool_calls": [None, call]}])
    assert called["tool_calls"] == [{"function": {"name": "f", "arguments": read}}]


A: dict[str, Any] = {"role": "assistant", "content": "a"}
LINE = "[An image was here, but only text can be read.]"


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({**A, "reasoning": "t"}, {**A, "reasoning_content": "t"}),
        ({**A, "reasoning_content": None, "thinking": "t", "reasoning": ""}, {**A, "reasoning_content": "t"}),
        ({**A, "reasoning_details": [{"text": "t"}, {"data": "x"}, None]}, {**A, "reasoning_content": "t"}),
        ({**A, "thinking_blocks": [{"thinking": "t", "signature": "s"}]}, {**A, "reasoning_content": "t"}),
        ({**A, "reasoning": {"text": "t"}, "reasoning_details": []}, A),
        (
            {**A, "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, "a"]},
            {**A, "reasoning_content": "t"},
        ),
        ({**A, "content": None, "refusal": "no"}, {**A, "content": "no"}),
        ({**A, "annotations": [{"type": "url_citation"}], "nmae": "x", "audio": {}}, A),
        ({**USER, "content": ["\ud83d", "\ude00 \0", "\ude00"]}, {**USER, "content": "😀 \ufffd\ufffd"}),
        ({**USER, "content": [{"type": "image_url"}]}, {**USER, "content": LINE}),
        ({**USER, "content": ["a", {"type": "image_url"}, "b"]}, {**USER, "content": f"a\n{LINE}\nb"}),
        (
            {"role": "tool", "content": {"a": 1}},
            {"role": "user", "content": '[The result of an earlier call:]\n{"a": 1}'},
        ),
    ],
)
def test_what_others_write_is_read(message: Any, read: Any) -> None:
    assert read_messages([message]) == [read]


def test_a_list_of_no_calls_is_none() -> None:
    """As servers write it beside an answer that called none."""
    assert read_messages([{"role": "assistant", "content": "a", "tool_calls": []}])[0].keys() == {"role", "content"}


def test_what_developers_say_is_what_the_system_says() -> None:
    assert read_messages([{"role": "developer", "content": "Be brief."}])[0]["role"] == "system"


def test_what_the_openai_package_wrote_of_an_answer_is_read() -> None:
    call = ChatCompletionMessageFunctionToolCall(id="1", type="function", function=Function(name="f", arguments="{}"))
    for answer in (
        ChatCompletionMessage(role="assistant", content="Yes.", annotations=[]),
        ChatCompletionMessage(role="assistant", content=None, tool_calls=[call]),
    ):
        [whole], [short] = read_messages([answer.model_dump()]), read_messages([answer.model_dump(exclude_none=True)])
        assert whole == short and whole["content"] == (answer.content or "")


@pytest.mark.parametrize("kind", ["Developer", "System", "User", "Assistant", "Tool", "Function"])
def test_every_field_of_the_openai_packages_messages_is_read_or_refused_by_name(kind: str) -> None:
    fields = getattr(chat, f"ChatCompletion{kind}MessageParam").__annotations__
    for name in fields.keys() - {"role", "content", "tool_calls"}:
        message = {**USER, name: "x"}
        try:
            assert read_messages([message])[0].items() >= USER.items()
        except InvalidRequest as error:
            assert str(error).startswith("message 1: ") and f"{name}" in str(error)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "`messages` must be a list of objects"),
        ("hi", "`messages` must be a list of objects"),
        ([USER, "hi"], "message 2: it is 'hi', but must be an object with `role` and `content`"),
        ([{"content": "hi"}], "message 1: `role` is None, but must be a text"),
        ([USER, {"role": "user", "contnt": "x"}], "message 2: unknown field of a message: 'contnt' (did you mean 'con"),
        ([USER, {"role": "user"}], "message 2: `content` is missing, which a user's message must have"),
        ([USER, {"role": "user", "text": "x"}], "message 2: unknown field of a message: 'text'"),
        ([{"role": "assistant", "contnt": "x"}], "message 1: unknown field of a message: 'contnt'"),
        ([{"role": "user", "content": 7}], "message 1: `content` is 7, but must be a text"),
        ([{**USER, "name": 3}], "message 1: `name` is 3, but must be a text"),
        ([USER, {"role": "sytem", "content": "hi"}], "message 2: `role` is 'sytem' (did you mean 'system'?)"),
        ([{"role": "us\0er", "content": "hi"}], "message 1: `role` holds a NUL or half of a surrogate pair"),
        ([{"role": "assistant", "tool_calls": 1}], "message 1: `tool_calls` must be a list of calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "message 1: `tool_calls` has one without a `function`"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "custom": {}}]}], "message 1: `tool_calls` has one without"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": "\0"}]}], "message 1: `id` holds a NUL"),
    ],
)
def test_what_is_no_message_is_refused_with_its_number(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_messages(messages)
    assert says in str(refused.value) and len(str(refused.value)) < 300
