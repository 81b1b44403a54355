"""A response, as the OpenAI package's own type has it, and with the fields that Open Responses requires."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseCustomToolCall, ResponseFunctionToolCall, ResponseOutputText

from cortexmlx.protocols import responses
from cortexmlx.protocols.request import ReplyInfo, Request, RequestDefaults
from cortexmlx.protocols.responses.reply import custom_tool_input
from cortexmlx.protocols.seal import Seal
from cortexmlx.structured.tools import ToolCall
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support.open_responses import RESPONSE, faults

ASKED = Request(
    ("hi",),
    SamplingParams(max_tokens=5),
    body={"instructions": "Be brief.", "metadata": {"a": "b"}},
)


def response(answer: Completion) -> Response:
    info = ReplyInfo("7", "m", 1_767_225_600, lambda token: chr(token).encode())
    body = responses.write(ASKED, [[answer]], info)
    assert not faults(body, RESPONSE)
    return Response.model_validate(body)


def test_a_response_is_one_message_of_text_with_its_tokens() -> None:
    logprobs = (TokenLogprob(97, -0.5, ((97, -0.5), (99, -1.5))),)
    answer = Completion("a", (97,), FinishReason.STOP, Usage(5, 1, 2), Timings(0, 0, 0, 0, 0), logprobs)
    whole = response(answer)
    assert (whole.status, whole.output_text, whole.instructions, whole.metadata) == (
        "completed",
        "a",
        "Be brief.",
        {"a": "b"},
    )
    [message] = whole.output
    assert message.type == "message" and isinstance(text := message.content[0], ResponseOutputText)
    assert text.logprobs is not None and text.logprobs[0].bytes == [97]
    assert [top.token for top in text.logprobs[0].top_logprobs] == ["a", "c"]
    assert whole.usage is not None and (whole.usage.input_tokens, whole.usage.output_tokens) == (5, 1)
    cut = response(replace(answer, finish_reason=FinishReason.LENGTH, logprobs=None))
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_thoughts_are_an_item_of_their_own_before_the_message() -> None:
    usage = Usage(5, 3, thinking_tokens=2)
    answer = Completion("b", (97,), FinishReason.STOP, usage, Timings(0, 0, 0, 0, 0), thinking="a")
    thoughts, message = response(answer).output
    assert thoughts.type == "reasoning" and message.type == "message"
    assert thoughts.content is not None and [part.text for part in thoughts.content] == ["a"]
    assert response(answer).output_text == "b"
    counted = response(answer).usage
    assert counted is not None and counted.output_tokens_details.reasoning_tokens == 2


def test_a_response_says_what_was_cached_unless_it_is_to_be_repeatable() -> None:
    answer = Completion("a", (97,), FinishReason.STOP, Usage(5, 1, 2), Timings(0, 0, 0, 0, 0))
    for repeatable, cached in ((False, 2), (True, 0)):
        info = ReplyInfo("7", "m", 0, lambda token: b"a", repeatable=repeatable)
        usage = responses.write(ASKED, [[answer]], info)["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == cached


USAGE = Usage(5, 3)
INFO = ReplyInfo("7", "m", 1_767_225_600, lambda token: b"a", seal=Seal(b"secret", "alice"))
TOOLS: Any = [
    {"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "find"}]},
    {"type": "custom", "name": "patch"},
    {"type": "web_search"},
]


def answer(**parts: Any) -> Completion:
    return Completion(parts.pop("text", ""), (97,), FinishReason.STOP, USAGE, Timings(0, 0, 2.4, 0, 0), **parts)


def test_calls_are_named_as_the_client_names_its_tools() -> None:
    asked = responses.read({"input": "hi", "tools": TOOLS}, RequestDefaults(SamplingParams()))
    calls = (ToolCall("a", "crm__find", '{"x": 1}'), ToolCall("b", "patch", '{"input": "*** é\\n"}'))
    body = responses.write(asked, [[answer(tool_calls=calls)]], INFO)
    find, patch = Response.model_validate(body).output
    assert isinstance(find, ResponseFunctionToolCall)
    assert (find.name, find.namespace, find.arguments) == ("find", "crm", '{"x": 1}')
    assert isinstance(patch, ResponseCustomToolCall) and (patch.name, patch.input) == ("patch", "*** é\n")
    assert [tool["type"] for tool in body["tools"]] == ["namespace", "custom"]


def test_thoughts_are_sealed_if_that_was_asked_for() -> None:
    for include, expected in (([responses.ENCRYPTED], "Hm."), ([], None)):
        defaults = RequestDefaults(SamplingParams(), seal=INFO.seal)
        asked = responses.read({"input": "hi", "include": include}, defaults)
        body = responses.write(asked, [[answer(text="a", thinking="Hm.")]], INFO)
        assert not faults(body, RESPONSE)
        sealed = body["output"][0].get("encrypted_content")
        assert (sealed and INFO.seal and INFO.seal.unwrap(sealed)) == expected


def test_a_response_repeats_its_request_and_says_when_it_ended() -> None:
    said = {
        **{"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "max_tool_calls": 3, "top_p": 0.5},
        **{"reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}, "tool_choice": "none"},
    }
    defaults = RequestDefaults(SamplingParams(presence_penalty=0.5))
    body = responses.write(responses.read({"input": "hi", **said}, defaults), [[answer(text="a")]], INFO)
    assert not faults(body, RESPONSE)
    assert {name: body[name] for name in said} == {
        **said,
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    assert (body["presence_penalty"], body["store"]) == (0.5, False)
    assert body["completed_at"] == INFO.created + 2


def test_a_reply_is_kept_when_it_has_ended() -> None:
    kept: list[Any] = []
    info = replace(INFO, keep=lambda request, body: kept.append((request, body)))
    body = responses.write(ASKED, [[answer(text="a")]], info)
    assert kept == [(ASKED, body)]


@given(st.text())
def test_the_input_of_a_custom_tool_is_the_text_that_the_model_wrote(text: str) -> None:
    assert custom_tool_input(json.dumps({"input": text})) == text


@pytest.mark.parametrize("arguments", ["", "[]", '"a"', "{}", '{"input"'])
def test_what_is_no_input_stays_as_it_is(arguments: str) -> None:
    assert custom_tool_input(arguments) == arguments
