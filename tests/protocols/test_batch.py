"""The records of a batch: the shape of each question, as the OpenAI package's own types have it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai.types import Completion as TheirCompletion
from openai.types.chat import ChatCompletion

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import (
    PROTOCOLS,
    BatchRequest,
    InvalidLine,
    LineStyle,
    RecordBuilder,
    error_record,
    read_line,
    record_key,
    request_key,
)
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest
from cortexmlx.protocols.request import Request, RequestDefaults
from cortexmlx.types.embeddings import Embeddings
from cortexmlx.types.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams

LOGPROBS = (TokenLogprob(97, -0.5, ((97, -0.5), (99, -1.5))), TokenLogprob(98, -2.0))
RECORDER = RecordBuilder("m", 1_767_225_600, lambda token: chr(token).encode())


def answer(text: str, tokens: int, logprobs: tuple[TokenLogprob, ...] | None = None, index: int = 0) -> Completion:
    usage = Usage(prompt_tokens=5, completion_tokens=tokens, cached_tokens=2)
    timings = Timings(0, 0, 0, 0, 0)
    return Completion(text, tuple(range(tokens)), FinishReason.STOP, usage, timings, logprobs, index)


def request(style: LineStyle, *prompts: Any, echo: bool = False) -> BatchRequest:
    return BatchRequest(7, "q", style, Request(prompts or ("hi",), SamplingParams(), echo=echo))


def body_of(asked: BatchRequest, *answers: list[Completion]) -> dict[str, Any]:
    body: dict[str, Any] = RECORDER.completion_record(asked, answers)["response"]["body"]
    return body


def test_the_prompt_of_several_answers_is_counted_once() -> None:
    body = body_of(request(LineStyle.CHAT), [answer("a", 3), answer("b", 4)])
    counted = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert body["usage"] == {**counted, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "a"), (1, "b")]
    simple = RECORDER.completion_record(request(LineStyle.SIMPLE), [[answer("a", 3), answer("b", 4)]])
    assert (simple["id"], simple["text"], [other["text"] for other in simple["others"]]) == ("q", "a", ["b"])
    assert "others" not in RECORDER.completion_record(request(LineStyle.SIMPLE), [[answer("a", 3)]])


def test_the_answers_of_several_prompts_are_choices_one_after_the_other() -> None:
    asked = request(LineStyle.COMPLETIONS, "x", [121, 122], echo=True)
    body = body_of(asked, [answer("a", 1), answer("b", 1, index=1)], [answer("c", 1), answer("d", 1, index=1)])
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "xa"), (1, "xb"), (2, "yzc"), (3, "yzd")]
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    TheirCompletion.model_validate(body, strict=True)


def test_log_probabilities_have_the_shape_of_each_endpoint() -> None:
    chat = body_of(request(LineStyle.CHAT), [answer("ab", 2, LOGPROBS)])
    [choice] = ChatCompletion.model_validate(chat, strict=True).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first, second = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("a", [97], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.5), ("c", -1.5)]
    assert (second.token, second.top_logprobs) == ("b", [])
    text = body_of(request(LineStyle.COMPLETIONS), [answer("ab", 2, LOGPROBS)])
    [theirs] = TheirCompletion.model_validate(text, strict=True).choices
    assert theirs.logprobs is not None
    assert (theirs.logprobs.tokens, theirs.logprobs.text_offset) == (["a", "b"], [0, 1])
    assert theirs.logprobs.token_logprobs == [-0.5, -2.0]
    assert theirs.logprobs.top_logprobs == [{"a": -0.5, "c": -1.5}, {}]
    simple = RECORDER.completion_record(request(LineStyle.SIMPLE), [[answer("ab", 2, LOGPROBS)]])
    assert [(token["token_id"], token["token"]) for token in simple["logprobs"]] == [(97, "a"), (98, "b")]
    assert "logprobs" not in RECORDER.completion_record(request(LineStyle.SIMPLE), [[answer("ab", 2)]])


def test_those_of_a_prompt_stand_beside_the_first_answer_or_with_an_echo_before_it() -> None:
    ids, own = np.array([[0, 0], [105, 1]], np.int32), np.array([np.nan, -1.5], np.float32)
    told = PromptLogprobs((104, 105), own, ids, np.array([[0, 0], [-1.5, -math.inf]], np.float32))
    answers = [replace(answer("ab", 2, LOGPROBS, index=i), prompt_logprobs=told) for i in range(2)]
    asked = request(LineStyle.COMPLETIONS)
    first, second = body_of(asked, answers)["choices"]
    listed = first["prompt_logprobs"]
    assert listed[0] is None and (listed[1]["token"], listed[1]["logprob"]) == ("i", -1.5)
    assert "prompt_logprobs" not in second and first["text"] == "ab"
    simple = RECORDER.completion_record(request(LineStyle.SIMPLE), [answers])
    assert simple["prompt_logprobs"] == listed and "prompt_logprobs" not in simple["others"][0]
    for choice in body_of(request(LineStyle.COMPLETIONS, echo=True), answers)["choices"]:
        assert choice["text"] == "hiab" and "prompt_logprobs" not in choice
        assert choice["logprobs"] == {
            "text_offset": [0, 1, 2, 3],
            "tokens": ["h", "i", "a", "b"],
            "token_logprobs": [None, -1.5, -0.5, -2.0],
            "top_logprobs": [None, {"i": -1.5, "\x01": -9999.0}, {"a": -0.5, "c": -1.5}, {}],
        }


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_the_openai_packages_types_take_every_reason_to_end(reason: FinishReason) -> None:
    one = replace(answer("a", 1), finish_reason=reason)
    chat = ChatCompletion.model_validate(body_of(request(LineStyle.CHAT), [one]), strict=True)
    text = TheirCompletion.model_validate(body_of(request(LineStyle.COMPLETIONS), [one]), strict=True)
    assert chat.choices[0].finish_reason == text.choices[0].finish_reason == reason.value


def test_nothing_in_a_record_depends_on_how_the_run_went() -> None:
    for style in PROTOCOLS:
        one = answer("a", 3)
        other = replace(one, usage=replace(one.usage, cached_tokens=0), timings=Timings(1, 2, 3, 4, 5))
        assert RECORDER.completion_record(request(style), [[one]]) == RECORDER.completion_record(
            request(style), [[other]]
        )
    item = BatchRequest(7, "q", LineStyle.EMBEDDINGS, EmbeddingRequest(("a",)))
    first, second = (Embeddings(np.ones((1, 4), np.float32), (5,), (cached,), (False,)) for cached in (0, 4))
    record = RECORDER.embedding_record(item, first)
    assert record == RECORDER.embedding_record(item, second) and record_key(record) == request_key("q", 7)
    assert record["custom_id"] == "q" and record["response"]["body"]["data"][0]["embedding"] == [1.0] * 4


def test_an_error_stands_in_the_place_of_an_answer_with_its_line() -> None:
    error = {"code": "invalid_request", "message": "bad", "line": 7}
    assert error_record(InvalidLine(7, "q", LineStyle.SIMPLE, "bad"), "bad") == {"id": "q", "error": error}
    assert error_record(request(LineStyle.CHAT), "gone", code="cancelled") == {
        "id": "batch_req_7",
        "custom_id": "q",
        "response": None,
        "error": {"code": "cancelled", "message": "gone", "line": 7},
    }


@pytest.mark.parametrize("style", list(LineStyle))
def test_a_record_has_the_key_of_its_request(style: LineStyle) -> None:
    for identity in ("q", 3, None):
        bad = InvalidLine(7, identity, style, "bad")
        assert record_key(error_record(bad, "bad")) == request_key(identity, 7)
    if style in PROTOCOLS:
        assert record_key(RECORDER.completion_record(request(style), [[answer("a", 1)]])) == request_key("q", 7)
    assert record_key({"text": "no record"}) is None


def test_thoughts_are_apart_from_the_answer() -> None:
    thought = replace(answer("b", 1), thinking="a", raw_text="<think>a</think>b")
    message = ChatCompletion.model_validate(body_of(request(LineStyle.CHAT), [thought])).choices[0].message
    assert message.content == "b" and message.model_extra == {"reasoning_content": "a"}
    simple = RECORDER.completion_record(request(LineStyle.SIMPLE), [[thought]])
    assert (simple["text"], simple["reasoning_content"]) == ("b", "a")
    assert "reasoning_content" not in RECORDER.completion_record(request(LineStyle.SIMPLE), [[answer("b", 1)]])


def test_the_tokens_of_thoughts_are_counted_in_all_answers() -> None:
    answers = [replace(answer("b", 9), usage=Usage(5, 9, thinking_tokens=count)) for count in (4, 3)]
    chat = ChatCompletion.model_validate(body_of(request(LineStyle.CHAT), answers), strict=True)
    assert chat.usage is not None and chat.usage.completion_tokens_details is not None
    assert (chat.usage.completion_tokens, chat.usage.completion_tokens_details.reasoning_tokens) == (18, 7)
    simple = RECORDER.completion_record(request(LineStyle.SIMPLE), [answers])
    assert [each["usage"]["thinking_tokens"] for each in (simple, *simple["others"])] == [4, 3]


def test_ids_of_another_kind_and_lines_without_one_have_other_names() -> None:
    keys = [
        request_key(2, 9),
        request_key("2", 9),
        request_key(None, 2),
        request_key("line 2", 9),
        request_key('"2"', 9),
    ]
    assert len(set(keys)) == 5 and request_key(2, 1) == keys[0]


@pytest.mark.parametrize(
    ("named", "adapter"), [("m", None), ("m:sql", "sql"), ("other:sql", "sql"), ("sql", "sql"), ("gpt", None)]
)
def test_a_body_names_its_adapter_as_the_server_reads_it(named: str, adapter: str | None) -> None:
    """An adapter may have the model's own name. Then the name alone is the model, as in the server."""
    line = {"url": "/v1/completions", "body": {"model": named, "prompt": "hi"}}
    read = read_line(line, LineStyle.COMPLETIONS, RequestDefaults(SamplingParams(), adapters=("sql", "m")), "m")
    assert isinstance(read, Request) and read.adapter == adapter


@pytest.mark.parametrize(
    ("named", "adapter"),
    [
        ("m:x:b", "x:b"),
        ("m:b", "b"),
        ("gpt:x:b", "x:b"),
        ("gpt:b", "b"),
        ("x:b", "x:b"),
        ("m:m:b", "m:b"),
        ("gpt:y:b", "b"),
    ],
)
def test_names_of_adapters_may_have_colons(named: str, adapter: str) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": named, "prompt": "a"}}
    read = read_line(line, LineStyle.COMPLETIONS, RequestDefaults(SamplingParams(), adapters=("b", "x:b", "m:b")), "m")
    assert isinstance(read, Request) and read.adapter == adapter
    line["body"] = {"model": "m:x:c", "prompt": "a"}
    with pytest.raises(InvalidRequest, match="'x:c'"):
        read_line(line, LineStyle.COMPLETIONS, RequestDefaults(SamplingParams(), adapters=("b", "x:b")), "m")


@pytest.mark.parametrize("named", ["m:sql", "sql", "m:typo"])
def test_no_vectors_come_from_an_adapter(named: str) -> None:
    line = {"url": "/v1/embeddings", "body": {"model": named, "input": "hi"}}
    with pytest.raises(InvalidRequest, match="adapter"):
        read_line(line, LineStyle.EMBEDDINGS, RequestDefaults(SamplingParams(), adapters=("sql",)), "m")
    assert isinstance(
        read_line(line, LineStyle.EMBEDDINGS, RequestDefaults(SamplingParams()), "other"), EmbeddingRequest
    )
