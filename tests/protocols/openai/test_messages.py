"""Messages as others write them: read, or refused by name with their number."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import chat
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from cortexmlx.errors import InvalidRequest
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
    for arguments in (None, "", "{}", {}):
        [called] = read_messages([{**called, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
        assert called["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


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
            assert read_messages([message]) == [message]
        except InvalidRequest as error:
            assert str(error).startswith("message 1: ") and f"{name}" in str(error)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "`messages` must be a list of objects"),
        ("hi", "`messages` must be a list of objects"),
        ([USER, "hi"], "message 2: it is 'hi', but must be an object with `role` and `content`"),
        ([{"content": "hi"}], "message 1: `role` is None, but must be a text"),
        ([USER, {"role": "user"}], "message 2: `content` is None, but must be a text"),
        ([{"role": "user", "content": 7}], "message 1: `content` is 7, but must be a text"),
        ([{"role": "user", "content": "\ud83d"}], "message 1: `content` holds a NUL or half of a surrogate pair"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1: a message's `content` has a part of type"),
        ([{**USER, "nmae": "x"}], "message 1: unknown field of a message: 'nmae' (did you mean 'name'?)"),
        ([{**USER, "name": 3}], "message 1: `name` is 3, but must be a text"),
        ([{**USER, "annotations": [{"type": "url_citation"}]}], "message 1: `annotations` are not served"),
        ([{"role": "assistant", "refusal": "no"}], "message 1: `refusal` is not served: templates know none"),
        ([{"role": "us\0er", "content": "hi"}], "message 1: `role` holds a NUL or half of a surrogate pair"),
        ([{"role": "assistant", "tool_calls": []}], "message 1: `content` is None, but must be a text"),
        ([{"role": "assistant", "tool_calls": 1}], "message 1: `tool_calls` must be a list of calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "message 1: `tool_calls` has one without a `function`"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "custom": {}}]}], "unknown field of a tool call: 'custom'"),
        *(
            (
                [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}],
                f"message 1: the `arguments` of the tool call 'f' are {what}",
            )
            for arguments, what in (
                ("{", "no JSON"),
                ("[" * 9999, "nested too deeply"),
                ("[1]", "[1], no object"),
            )
        ),
    ],
)
def test_what_is_no_message_is_refused_with_its_number(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_messages(messages)
    assert says in str(refused.value) and len(str(refused.value)) < 300
