"""A response, as the OpenAI package's own type has it."""

from __future__ import annotations

from dataclasses import replace

from openai.types.responses import Response, ResponseOutputText

from cortexmlx.logprobs import TokenLogprob
from cortexmlx.protocols.request import BatchRequest, Style
from cortexmlx.protocols.responses import response_body
from cortexmlx.request import Completion, FinishReason, SamplingParams, Timings, Usage

ASKED = BatchRequest(
    7,
    "q",
    Style.RESPONSES,
    ("hi",),
    SamplingParams(max_tokens=5),
    body={"instructions": "Be brief.", "metadata": {"a": "b"}},
)


def response(answer: Completion) -> Response:
    body = response_body(ASKED, answer, "m", 1_767_225_600, lambda token: chr(token).encode())
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
