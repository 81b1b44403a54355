"""The items of an input: as messages, in the form in which they are kept, and as clients send them back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseReasoningItem

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import responses
from cortexmlx.protocols.request import Body, ReplyInfo, RequestDefaults
from cortexmlx.protocols.responses.reader import read_items, stored_item
from cortexmlx.protocols.seal import Seal
from cortexmlx.structured.tools import ToolCall
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams

SEAL = Seal(b"secret", "alice")
USER = {"role": "user", "content": "hi"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}


def thoughts(**others: Any) -> Body:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], **others}


def read(*items: Any, seal: Seal | None = SEAL) -> Any:
    (messages,) = responses.read({"input": list(items)}, RequestDefaults(SamplingParams(), seal=seal)).prompts
    return messages


def refused(*items: Any, seal: Seal | None = SEAL) -> str | None:
    with pytest.raises(InvalidRequest) as error:
        read(*items, seal=seal)
    return error.value.field


def called(*names: str, **more: Any) -> Body:
    calls = [{"id": "c", "type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def test_thoughts_join_the_answer_that_follows_them() -> None:
    assert read(USER, thoughts(), ANSWER, USER)[1] == {**read(ANSWER)[0], "reasoning_content": "Hm."}
    assert read(USER, thoughts(), CALL, OUTPUT)[1] == called("f", reasoning_content="Hm.")
    assert read(USER, thoughts(), thoughts(), CALL, CALL)[1] == called("f", "f", reasoning_content="Hm.Hm.")


@pytest.mark.parametrize("items", [(thoughts(), USER), (USER, thoughts()), (USER, thoughts(), thoughts())])
def test_thoughts_that_no_answer_follows_are_left_out(items: Any) -> None:
    assert read(*items) == [USER]


def test_an_answer_is_one_message_whatever_the_order_of_its_items() -> None:
    assert read(USER, ANSWER, CALL, CALL)[1] == called("f", "f", content="Hi.")
    assert read(USER, CALL, ANSWER, OUTPUT)[1] == called("f", content="Hi.")
    assert read(USER, CALL, ANSWER, ANSWER)[1] == called("f", content="Hi.Hi.")
    assert [message["role"] for message in read(ANSWER, ANSWER, CALL, OUTPUT, CALL, OUTPUT)] == [
        *("assistant", "assistant", "tool", "assistant", "tool")
    ]


def test_sealed_thoughts_are_read_where_there_are_no_others() -> None:
    sealed = SEAL.wrap("Sealed.")
    for content in ([], None):
        item = thoughts(content=content, encrypted_content=sealed, summary=[{"type": "summary_text", "text": "S"}])
        assert read(USER, item, ANSWER)[1]["reasoning_content"] == "Sealed."
    assert read(USER, thoughts(encrypted_content=sealed), ANSWER)[1]["reasoning_content"] == "Hm."
    assert read(USER, thoughts(encrypted_content="x"), ANSWER, seal=None)[1]["reasoning_content"] == "Hm."
    assert "reasoning_content" not in read(USER, thoughts(content=None), ANSWER)[1]


@pytest.mark.parametrize(
    "sealed", ["x", "", "QUJD", "é", "\ud800", Seal(b"secret", "bob").wrap("a"), Seal(b"other", "alice").wrap("a")]
)
def test_thoughts_that_others_wrote_are_left_out(sealed: str) -> None:
    for content in (None, [{"type": "reasoning_text", "text": "Hm."}]):
        if sealed:
            assert read(USER, thoughts(content=content, encrypted_content=sealed), ANSWER) == read(USER, ANSWER)
    for item in (thoughts(content=["a"]), thoughts(content={"a": 1}), thoughts(content=None, summary=[{"text": "a"}])):
        assert read(USER, item, {"type": "web_search_call", "id": "ws_1"}, ANSWER) == read(USER, ANSWER)


def test_calls_of_groups_and_custom_tools_have_the_names_that_the_model_knows() -> None:
    assert read(USER, {**CALL, "namespace": "crm"})[1] == called("crm__f")
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "text"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]}
    call, said = read(USER, custom, output)[1:]
    assert call["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "text"}}
    assert said == {"role": "tool", "tool_call_id": "c", "content": "ok"}


IMAGE = {"type": "input_image", "image_url": "data:,"}


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"type": ["message"]}, "input[0].type"),
        ({**CALL, "namespace": 5}, "input[0].namespace"),
        ({**CALL, "id": 5}, "input[0].id"),
        ({**CALL, "call_id": None}, "input[0].call_id"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].id"),
        ({"type": "item_reference"}, "input[0].id"),
    ],
)
def test_an_error_names_the_item(item: Any, field: str) -> None:
    assert refused(item) == field


class OneEarlier:
    """What was kept: one item."""

    def response(self, id: str) -> None:
        return None

    def find_item(self, id: str) -> Any:
        return {**ANSWER, "id": "msg_1"} if id == "msg_1" else None


def test_a_reference_stands_for_the_item() -> None:
    defaults = RequestDefaults(SamplingParams(), earlier_responses=OneEarlier())
    asked = {"input": [USER, {"type": "item_reference", "id": "msg_1"}, USER]}
    assert responses.read(asked, defaults).prompts == (read(USER, ANSWER, USER),)


@pytest.mark.parametrize(
    "item",
    [
        *(USER, ANSWER, thoughts(), CALL, OUTPUT, {**CALL, "namespace": "n", "id": "fc_1"}),
        *({**USER, "content": [IMAGE, "a", {"type": "zzz"}]}, {**OUTPUT, "output": {"a": 1}}, {**OUTPUT, "output": 5}),
        *({**CALL, "arguments": {"a": [None]}}, {**CALL, "arguments": "{"}, {**CALL, "arguments": None}),
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {"a": 1}},
    ],
)
def test_the_kept_form_says_the_same(item: Any) -> None:
    ((_, plain),) = read_items([item], None)
    kept = stored_item(plain)
    assert kept["status"] == "completed" and kept["type"] == item.get("type", "message")
    assert read(USER, plain) == read(USER, kept)


def test_what_has_no_effect_and_is_no_text_is_not_kept() -> None:
    deep: Any = [[[["a"]]]]
    for item in (USER, ANSWER, thoughts(), CALL, OUTPUT, {**OUTPUT, "output": [{"type": "input_text", "text": "r"}]}):
        said = {**item, "caller": deep, "agent": deep, "phase": deep, "status": deep, "created_by": deep}
        ((_, plain),) = read_items([said], None)
        assert '"a"' not in json.dumps(stored_item(plain))


INFO = ReplyInfo("7", "m", 1_767_225_600, lambda token: b"a", seal=SEAL)


@pytest.mark.parametrize("dumped", ["objects", "nulls", "without nulls"])
def test_what_a_response_wrote_can_be_sent_back_as_the_package_has_it(dumped: str) -> None:
    tools: Any = [
        {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "f"}]},
        {"type": "custom", "name": "patch"},
    ]
    asked = {"input": "hi", "tools": tools, "include": [responses.ENCRYPTED, responses.LOGPROBS]}
    calls = (ToolCall("c", "crm__f", '{"a": 1}'), ToolCall("d", "patch", '{"input": "x"}'))
    answer = Completion(
        "Hi.", (1,), FinishReason.TOOL_CALLS, Usage(1, 1), Timings(0, 0, 0, 0, 0), (), thinking="Hm.", tool_calls=calls
    )
    defaults = RequestDefaults(SamplingParams(), seal=SEAL)
    reply = Response.model_validate(responses.write(responses.read(asked, defaults), [[answer]], INFO))
    assert isinstance(reply.output[0], ResponseReasoningItem) and reply.output[0].encrypted_content
    if dumped == "objects":
        sent: list[Any] = [item.to_dict() for item in reply.output]
    else:
        sent = [item.model_dump(exclude_none=dumped == "without nulls", by_alias=True) for item in reply.output]
    sent.append({**OUTPUT, "id": None, "status": None, "created_by": None})
    for more in ({}, {"tools": tools}):
        (messages,) = responses.read({"input": [USER, *sent], **more}, defaults).prompts
        assert messages[1] == {
            "role": "assistant",
            "content": "Hi.",
            "reasoning_content": "Hm.",
            "tool_calls": [call.as_mapping() for call in calls],
        }
