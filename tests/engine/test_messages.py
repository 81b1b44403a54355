"""Chat messages as a prompt: which variables a request's body asks for, and messages as others write them."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import chat
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import ChatPrompt, body_vars, check_fields, checked_vars, plain_message, read_messages


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
    assert body_vars(body) == wanted


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
    assert body_vars(body, {"enable_thinking": True, "a": 1}) == wanted


def test_variables_are_a_map_from_names() -> None:
    given = {"a": 1}
    copied = checked_vars(given)
    assert copied == given and copied is not given
    for wrong in ({1: 2}, [("a", 1)], "a", None):
        with pytest.raises(InvalidRequest, match="template_vars is"):
            checked_vars(wrong)
    assert ChatPrompt([{"role": "user", "content": "a"}]).template_vars == {}


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


def test_an_unknown_field_is_named_with_those_that_it_may_stand_for() -> None:
    check_fields(["a"], ("a", "b"), "a thing")
    with pytest.raises(InvalidRequest, match=r"unknown fields of a thing: 'f0', .*, 'f9' and 3 more$"):
        check_fields([f"f{i}" for i in range(13)], ("a",), "a thing")


def test_a_messages_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a "}, "b", {"type": "input_text", "text": " c"}]
    assert plain_message({"role": "user", "content": parts, "name": "x"}) == {
        "role": "user",
        "content": "a b c",
        "name": "x",
    }
    for content in ("a", None, {"anything": "else"}):
        assert plain_message({"content": content}) == {"content": content}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "'image_url'"),
        ({"type": "image"}, "'image'"),
        (b"bytes", "'bytes'"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_type(part: object, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"part of type {kind}, but only text is read: images"):
        plain_message({"role": "user", "content": [{"type": "text", "text": "look"}, part]})


def test_a_part_of_text_without_its_text_is_not_taken_for_an_image() -> None:
    with pytest.raises(InvalidRequest, match="part of type 'text' whose `text` is no text"):
        plain_message({"role": "user", "content": [{"type": "text", "text": None}]})
