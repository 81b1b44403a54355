"""Every kind of batch line, good and bad: what it becomes, and that a bad one is never the end of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.batch.input import BadLine, BatchReader, BatchRequest, Style
from cortexmlx.request import SamplingParams

DEFAULTS = SamplingParams(max_tokens=99)


def read(*lines: bytes | dict[str, Any], jsonl: bool | None = None, raw: bool = False) -> list[BatchRequest | BadLine]:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(BatchReader(encoded, DEFAULTS, jsonl=jsonl, raw=raw))


def test_plain_lines_are_prompts_and_blank_ones_are_nothing() -> None:
    assert read(b"first\n", b"\n", b"  third \r\n") == [
        BatchRequest(1, 1, Style.SIMPLE, "first", DEFAULTS),
        BatchRequest(3, 3, Style.SIMPLE, "third", DEFAULTS),
    ]


def test_simple_json_lines_carry_their_own_parameters() -> None:
    line = {"id": "a", "prompt": "hi", "temp": 0.5, "max_tokens": 7, "stop": "END", "seed": None, "top_k": 5}
    [request] = read(line)
    assert isinstance(request, BatchRequest) and (request.id, request.prompt, request.raw) == ("a", "hi", False)
    assert request.params == SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), top_k=5)


def test_messages_keep_their_roles_and_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [request] = read({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]})
    assert isinstance(request, BatchRequest)
    assert request.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]


def test_openai_chat_and_completions_lines() -> None:
    chat = {
        "custom_id": "c1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 5,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"42": -100},
        },
    }
    text = {"custom_id": "c2", "url": "/v1/completions", "body": {"prompt": "once", "logprobs": 3, "n": 2}}
    first, second = read(chat, text)
    assert isinstance(first, BatchRequest) and isinstance(second, BatchRequest)
    assert (first.style, first.id, first.raw) == (Style.CHAT, "c1", False)
    assert first.params == SamplingParams(max_tokens=5, logprobs=2, logit_bias={42: -100})
    assert (second.style, second.prompt, second.raw) == (Style.COMPLETIONS, "once", True)
    assert second.params == SamplingParams(max_tokens=99, logprobs=3, n=2)


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "once", **body}}


def test_an_echo_has_log_probabilities_if_the_answer_has() -> None:
    bare, scored, chat = read(
        completion(echo=True),
        completion(echo=True, logprobs=2, max_tokens=0),
        {**CHAT, "body": {"messages": [{"role": "user", "content": "hi"}], "echo": True}},
    )
    assert isinstance(bare, BatchRequest) and isinstance(scored, BatchRequest) and isinstance(chat, BatchRequest)
    assert bare.echo and bare.params == DEFAULTS
    assert scored.echo and scored.params == replace(DEFAULTS, max_tokens=0, logprobs=2, prompt_logprobs=2)
    assert not chat.echo, "there is no such thing in a chat"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"echo": "yes"}, "echo is 'yes', but must be true or false"),
        ({"echo": True, "prompt": [1, 2]}, "echo needs a `prompt` that is a text"),
        ({"echo": True, "max_tokens": 0}, "max_tokens is 0, but must be an integer in 1..2147483647 (0 only with"),
    ],
)
def test_an_echo_of_what_is_no_text_is_an_error(body: dict[str, Any], message: str) -> None:
    [bad] = read(completion(**body))
    assert isinstance(bad, BadLine) and bad.message.startswith(message)


def test_token_ids_are_a_prompt_too() -> None:
    [request] = read({"prompt": [1, 2, 3]})
    assert isinstance(request, BatchRequest) and request.prompt == [1, 2, 3]


CHAT = {"custom_id": "x", "url": "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "hi"', "not JSON: Expecting"),
        (b"[1, 2]", "a JSON list, but must be an object"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at column 13"),
        (b"[" * 100_000, "not JSON"),
        ({"text": "hi"}, "`prompt` or `messages` must be one text or a list of token ids, not NoneType"),
        ({"prompt": ["a", "b"]}, "must be one text or a list of token ids, not list"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a\0b"}, "a NUL or half of a surrogate pair"),
        (b'{"prompt": "\\ud800"}', "a NUL or half of a surrogate pair"),
        ({"messages": []}, "`messages` must be a list of objects"),
        ({"messages": [{"content": "hi"}]}, "a message has no `role`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "part of type 'image_url'",
        ),
        ({"messages": [{"role": "user"}]}, "a message's `content` must be text, not NoneType"),
        ({"prompt": "hi", "temperature": -1}, "temperature is -1, but must be a number in [0, 100]"),
        ({"prompt": "hi", "max_tokens": "many"}, "max_tokens is 'many'"),
        ({"prompt": "hi", "stop": [1]}, "stop is [1]"),
        ({"prompt": "hi", "logit_bias": [1]}, "logit_bias is [1], but must be an object"),
        ({**CHAT, "method": "GET", "body": {}}, "method is 'GET', but must be 'POST'"),
        ({**CHAT, "url": "/v1/embeddings", "body": {}}, "url is '/v1/embeddings', but must be one of /v1/chat/"),
        (CHAT, "`body` is missing or not an object"),
        ({**CHAT, "body": {"prompt": "hi"}}, "`messages` is missing"),
        ({**CHAT, "body": {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}}, "'tools' is not supported"),
        ({"prompt": "hi", "stream": True}, "'stream' is not supported"),
    ],
)
def test_a_bad_line_says_why_with_its_number_and_the_next_is_read(line: bytes | dict[str, Any], says: str) -> None:
    bad, good = read(line, {"prompt": "next"}, jsonl=True)
    assert isinstance(bad, BadLine) and bad.line == 1 and says in bad.message
    assert isinstance(good, BatchRequest) and good.line == 2


def test_a_bad_line_keeps_its_id_if_it_has_one() -> None:
    [bad] = read({"custom_id": "mine", "url": "/v1/chat/completions", "body": None})
    assert (bad.id, bad.style) == ("mine", Style.CHAT)


def test_the_first_line_decides_unless_told() -> None:
    assert [type(r) for r in read(b"plain", b'{"prompt": "x"}')] == [BatchRequest, BatchRequest]
    assert [type(r) for r in read(b"plain", b'{"prompt": "x"}', jsonl=True)] == [BadLine, BatchRequest]
    [request] = read(b'{"prompt": "x"}', jsonl=False)
    assert request == BatchRequest(1, 1, Style.SIMPLE, '{"prompt": "x"}', DEFAULTS)


def test_keys_without_meaning_are_counted() -> None:
    reader = BatchReader(
        [b'{"prompt": "a", "max_token": 3}', b'{"prompt": "b", "max_token": 3}'], DEFAULTS, jsonl=None, raw=False
    )
    assert len(list(reader)) == 2 and reader.ignored == {"max_token": 2}


def test_functions_are_nothing_that_a_line_can_name() -> None:
    [bad] = read({"prompt": "a", "logits_processors": ["print"]})
    assert isinstance(bad, BadLine) and bad.message == "'logits_processors' is not supported"
    [request] = read({"prompt": "a", "logits_processors": []})
    assert isinstance(request, BatchRequest) and request.params == DEFAULTS


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    "id",
    "custom_id",
    "method",
    "url",
    "body",
    "prompt",
    "messages",
    "stop",
    "n",
    "logprobs",
    "temperature",
    "tools",
]


@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), JSON), max_size=4) | st.lists(st.binary(max_size=40), max_size=4)
)
def test_no_line_ends_the_reading(lines: list[Any]) -> None:
    filled = [line for line in lines if not isinstance(line, bytes) or line.strip()]
    assert len(read(*lines, jsonl=True)) == len(filled)


CHAT = {"custom_id": "c", "url": "/v1/chat/completions"}
HI = [{"role": "user", "content": "hi"}]


def test_the_chat_templates_variables_are_vllms_and_openais() -> None:
    kwargs = {"enable_thinking": False, "left": None}
    for line, wanted in (
        ({**CHAT, "body": {"messages": HI, "chat_template_kwargs": kwargs}}, {"enable_thinking": False}),
        ({**CHAT, "body": {"messages": HI, "reasoning_effort": "low"}}, {"reasoning_effort": "low"}),
        ({"messages": HI, "reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ({"prompt": "hi", "chat_template_kwargs": {"a": [1]}}, {"a": [1]}),
    ):
        [request] = read(line)
        assert isinstance(request, BatchRequest) and request.template_vars == wanted


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": HI, "reasoning_effort": 3}, "reasoning_effort is 3"),
        ({"messages": HI, "chat_template_kwargs": [1]}, "chat_template_kwargs is [1]"),
        ({"prompt": [1, 2], "reasoning_effort": "low"}, "which this prompt does not go through"),
        (
            {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "a", "reasoning_effort": "low"}},
            "which this prompt does not go through",
        ),
    ],
)
def test_variables_that_no_template_gets_are_refused(line: dict[str, Any], said: str) -> None:
    [bad] = read(line)
    assert isinstance(bad, BadLine) and said in bad.message
