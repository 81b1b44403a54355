"""A response, as the OpenAI package's own type has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseOutputText

from cortexmlx.errors import InvalidRequest
from cortexmlx.logprobs import TokenLogprob
from cortexmlx.protocols.openai import responses
from cortexmlx.protocols.reply import ReplyInfo
from cortexmlx.protocols.request import Defaults, Request
from cortexmlx.request import Completion, FinishReason, Timings, Usage
from cortexmlx.sampling_params import SamplingParams

ASKED = Request(
    ("hi",),
    SamplingParams(max_tokens=5),
    body={"instructions": "Be brief.", "metadata": {"a": "b"}},
)


def response(answer: Completion) -> Response:
    info = ReplyInfo("7", "m", 1_767_225_600, lambda token: chr(token).encode())
    body = responses.write(ASKED, [[answer]], info)
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


USER = {"role": "user", "content": "hi"}


def prompts_of(said: dict[str, Any]) -> Any:
    return responses.read(said, Defaults(SamplingParams())).prompts


@pytest.mark.parametrize("input_", ["hi", [USER], [{"type": "message", **USER, "id": "m", "status": "completed"}]])
def test_the_input_of_a_response_is_a_text_or_messages(input_: Any) -> None:
    assert prompts_of({"input": input_}) == ([USER],)
    system = {"role": "system", "content": "Be brief."}
    assert prompts_of({"input": input_, "instructions": "Be brief."}) == ([system, USER],)


def thoughts(**others: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], **others}


def test_what_a_response_wrote_is_the_beginning_of_the_next_input() -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    (read,) = prompts_of({"input": [USER, thoughts(id="rs_1", status="completed"), answer, USER]})
    assert read == [USER, {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}, USER]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"input": ""}, "input"),
        ({"input": [USER, {"type": "computer_call"}]}, "input[1].type"),
        ({"input": [USER, {"type": "function_call_output"}]}, "input[1].call_id"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "a"}]}, "input[1].output"),
        ({"input": [USER, {"type": "function_call", "call_id": "a", "name": "f"}]}, "input[1].arguments"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"input": "a", "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"input": [USER, thoughts(), USER]}, "input[1]"),
        ({"input": [thoughts(), {"role": "assistant", "content": 3}]}, "input[1].content"),
        ({"input": "a", "instructions": 3}, "instructions"),
        ({"input": "a", "include": [responses.LOGPROBS, "x"]}, "include[1]"),
        ({"input": "a", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "metadata": {"run": 7}}, "metadata"),
    ],
)
def test_an_error_names_the_field_with_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        responses.read(body, Defaults(SamplingParams()))
    assert refused.value.field == path


def test_a_response_says_what_was_cached_unless_it_is_to_be_repeatable() -> None:
    answer = Completion("a", (97,), FinishReason.STOP, Usage(5, 1, 2), Timings(0, 0, 0, 0, 0))
    for repeatable, cached in ((False, 2), (True, 0)):
        info = ReplyInfo("7", "m", 0, lambda token: b"a", repeatable=repeatable)
        usage = responses.write(ASKED, [[answer]], info)["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == cached
