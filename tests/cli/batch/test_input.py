"""Every kind of batch line, good and bad: what it becomes, and that a bad one is never the end of the run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.batch.input import BatchReader, RequestIds, collect_ids, read_ids
from cortexmlx.cli.files.source import InputFormat
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import BatchRequest, InvalidLine, LineStyle, request_key
from cortexmlx.protocols.request import Request
from cortexmlx.types.sampling_params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=99)


def read(
    *lines: bytes | dict[str, Any], jsonl: bool | None = None, raw: bool = False
) -> list[BatchRequest | InvalidLine]:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(BatchReader(encoded, DEFAULTS, jsonl=jsonl, raw=raw))


def test_plain_lines_are_prompts_and_blank_ones_are_nothing() -> None:
    assert read(b"first\n", b"\n", b"  third \r\n") == [
        BatchRequest(1, 1, LineStyle.SIMPLE, Request(("first",), DEFAULTS)),
        BatchRequest(3, 3, LineStyle.SIMPLE, Request(("third",), DEFAULTS)),
    ]


def test_simple_json_lines_carry_their_own_parameters() -> None:
    line = {"id": "a", "prompt": "hi", "temp": 0.5, "max_tokens": 7, "stop": "END", "seed": None, "top_k": 5}
    [request] = read(line)
    assert isinstance(request, BatchRequest) and request.id == "a"
    assert (request.request.prompts, request.request.raw) == (("hi",), False)
    assert request.request.params == SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), top_k=5)


def test_messages_keep_their_roles_and_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [request] = read({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]})
    assert isinstance(request, BatchRequest)
    assert request.request.prompts[0] == [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]


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
    assert (first.style, first.id, first.request.raw) == (LineStyle.CHAT, "c1", False)
    assert first.request.params == SamplingParams(max_tokens=5, logprobs=2, logit_bias={42: -100})
    assert (second.style, second.request.prompts, second.request.raw) == (LineStyle.COMPLETIONS, ("once",), True)
    assert second.request.params == SamplingParams(max_tokens=99, logprobs=3, n=2)


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "once", **body}}


def test_an_echo_has_log_probabilities_if_the_answer_has() -> None:
    bare, scored, tokens = read(
        completion(echo=True), completion(echo=True, logprobs=2, max_tokens=0), completion(echo=True, prompt=[5, 6])
    )
    assert isinstance(bare, BatchRequest) and isinstance(scored, BatchRequest) and isinstance(tokens, BatchRequest)
    assert bare.request.echo and bare.request.params == DEFAULTS and tokens.request.echo
    assert scored.request.echo and scored.request.params == replace(
        DEFAULTS, max_tokens=0, logprobs=2, prompt_logprobs=2
    )


def test_a_response_is_a_chat_after_its_instructions() -> None:
    said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    [request] = read({"url": "/v1/responses", "body": {"input": said, "instructions": "Be brief."}})
    assert isinstance(request, BatchRequest) and (request.id, request.style) == (1, LineStyle.RESPONSES)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert request.request.prompts == (messages,) and not request.request.raw


CHAT = {"custom_id": "x", "url": "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "hi"', "not JSON: Expecting"),
        (b"[1, 2]", "a JSON list, but must be an object"),
        (b'{"prompt": "a", "n": 1, "n": 2}', "'n' is there more than once"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at column 13"),
        (b"[" * 100_000, "not JSON"),
        ({"text": "hi"}, "unknown field of a request: 'text'"),
        ({}, "`prompt` or `messages` must be one text or a list of token ids, not NoneType"),
        ({"prompt": "hi", "id": [1]}, "id is [1], but must be a text or an integer"),
        ({"prompt": "hi", "id": 1, "custom_id": "a"}, "there are both `custom_id` and `id`"),
        ({"prompt": "hi", "max_token": 3, "note": 1}, "'max_token' (did you mean 'max_tokens'?), 'note'"),
        ({"prompt": ["a", "b"]}, "must be one text or a list of token ids, not list"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a\0b"}, "a NUL or half of a surrogate pair"),
        (b'{"prompt": "\\ud800"}', "a NUL or half of a surrogate pair"),
        ({"messages": []}, "`messages` must be a list of objects"),
        ({"messages": [{"content": "hi"}]}, "message 1: `role` is None, but must be a text"),
        ({"messages": [{"role": "user", "text": "x"}]}, "message 1: unknown field of a message: 'text'"),
        ({"prompt": "hi", "temperature": -1}, "temperature is -1, but must be a number in [0, 100]"),
        ({"prompt": "hi", "max_tokens": "many"}, "max_tokens is 'many'"),
        ({"prompt": "hi", "stop": [1]}, "stop is [1]"),
        ({"prompt": "hi", "logit_bias": [1]}, "logit_bias is [1], but must be an object"),
        ({**CHAT, "method": "GET", "body": {}}, "method is 'GET', but must be 'POST'"),
        ({**CHAT, "url": "/v1/embeddings", "body": {}}, "`input` is missing"),
        ({"prompt": "hi", "adapter": "sql"}, "there is no adapter 'sql': none are loaded (--adapters)"),
        ({"prompt": "hi", "adapter": ["sql"]}, "adapter is ['sql'], but must be a text"),
        ({**CHAT, "url": "/v1/images", "body": {}}, "url is '/v1/images', but must be one of /v1/chat/completions, "),
        ({**CHAT, "url": [], "body": {}}, "url is [], but must be one of /v1/chat/completions, "),
        ({**CHAT, "body": {}, "priority": 1}, "unknown field of a request around its `body`: 'priority'"),
        (CHAT, "`body` is missing or not an object"),
        ({**CHAT, "body": {}}, "`messages` is missing"),
        ({**CHAT, "body": {"prompt": "hi"}}, "unknown field of a /v1/chat/completions body: 'prompt'"),
        ({**CHAT, "body": {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}}, "a tool has no `function`"),
        ({"prompt": "hi", "stream": True}, "'stream' is not served: the answers of a batch are whole"),
    ],
)
def test_a_bad_line_says_why_with_its_number_and_the_next_is_read(line: bytes | dict[str, Any], says: str) -> None:
    bad, good = read(line, {"prompt": "next"}, jsonl=True)
    assert isinstance(bad, InvalidLine) and bad.line == 1 and says in bad.message
    assert isinstance(good, BatchRequest) and good.line == 2


def test_json_within_json_that_is_nested_too_deeply_ends_no_run() -> None:
    calls = [{"function": {"name": "f", "arguments": "[" * 100_000}}]
    deep, good = read({"messages": [{"role": "assistant", "tool_calls": calls}]}, {"prompt": "next"})
    assert isinstance(deep, BatchRequest) and isinstance(deep.request, Request) and len(deep.request.notes) == 1
    assert isinstance(good, BatchRequest)


def test_an_object_of_very_many_fields_is_refused_at_once_and_in_a_few_words() -> None:
    names = "".join(f'"f{i}": 1, ' for i in range(50_000))
    began = time.thread_time()
    twice, unknown = read(f'{{{names}"f49999": 2}}'.encode(), f'{{{names}"prompt": "a"}}'.encode())
    assert isinstance(twice, InvalidLine) and twice.message == "'f49999' is there more than once"
    assert isinstance(unknown, InvalidLine) and unknown.message.endswith("'f9' and 49990 more")
    assert time.thread_time() - began < 30, "not a comparison of each with each"


def test_a_bad_line_keeps_its_id_if_it_has_one() -> None:
    [bad] = read({"custom_id": "mine", "url": "/v1/chat/completions", "body": None})
    assert (bad.id, bad.style) == ("mine", LineStyle.CHAT)
    [unknown] = read(b'{"custom_id": "mi', jsonl=True)
    assert unknown.id is None and request_key(unknown.id, unknown.line) == "line 1"


def test_the_first_line_decides_unless_told() -> None:
    assert [type(r) for r in read(b"plain", b'{"prompt": "x"}')] == [BatchRequest, BatchRequest]
    assert [type(r) for r in read(b"plain", b'{"prompt": "x"}', jsonl=True)] == [InvalidLine, BatchRequest]
    [marked] = read(b"\xef\xbb\xbf\r", b'{"id": "a", "prompt": "x"}')  # a blank line with the mark of the encoding
    assert marked.id == "a"
    [request] = read(b'{"prompt": "x"}', jsonl=False)
    assert request == BatchRequest(1, 1, LineStyle.SIMPLE, Request(('{"prompt": "x"}',), DEFAULTS))


def test_models_that_requests_name_are_known_in_the_end() -> None:
    reader = BatchReader([b'{"prompt": "a", "model": "big"}', b'{"prompt": "b"}'], DEFAULTS, jsonl=None, raw=False)
    assert len(list(reader)) == 2 and reader.models == {"big"}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"id": "a"}, {"id": "b"}, {"custom_id": "a"}], "lines 1 and 3 both have the id 'a'"),
        ([{"id": "x"}, {}, {"id": 2}], "lines 2 and 3 both have the id 2"),
    ],
)
def test_an_id_that_occurs_twice_ends_the_reading_with_both_lines(lines: list[dict[str, Any]], says: str) -> None:
    encoded = [json.dumps({"prompt": "hi", **line}).encode() for line in lines]
    with pytest.raises(InvalidRequest, match=says):
        collect_ids(encoded, None)
    with pytest.raises(InvalidRequest, match=says):
        list(BatchReader(encoded, DEFAULTS, jsonl=None, raw=False, ids=RequestIds()))


def test_a_broken_line_has_nobodys_id() -> None:
    """Ids from 0 on are those of the lines, less one: line 2 is broken, and 2 is the id of line 3."""
    lines = [b'{"id": 0, "prompt": "a"}', b"{oops", b'{"id": 2, "prompt": "c"}', b"\n", b'{"id": "2", "prompt": "d"}']
    assert collect_ids(lines, None).lines == {"0": 1, "line 2": 2, "2": 3, '"2"': 5}


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
    mark = b"\xef\xbb\xbf"
    filled = [line for line in lines if not isinstance(line, bytes) or line.strip().removeprefix(mark).lstrip()]
    assert len(read(*lines, jsonl=True)) == len(filled)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JSON), max_size=4) | st.lists(st.binary(max_size=9), max_size=4))
def test_the_survey_and_the_reader_agree_on_every_id(lines: list[Any]) -> None:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    try:
        surveyed = collect_ids(encoded, None)
    except InvalidRequest:
        return
    seen = RequestIds()
    list(BatchReader(encoded, DEFAULTS, jsonl=None, raw=False, ids=seen))
    assert list(seen.lines.items()) == list(surveyed.lines.items())


HI = [{"role": "user", "content": "hi"}]


def test_the_chat_templates_variables_are_vllms_and_openais() -> None:
    kwargs = {"enable_thinking": False, "left": None}
    for line, wanted in (
        ({**CHAT, "body": {"messages": HI, "chat_template_kwargs": kwargs}}, {"enable_thinking": False}),
        ({**CHAT, "body": {"messages": HI, "reasoning_effort": "low"}}, {"reasoning_effort": "low"}),
        ({"messages": HI, "reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ({"prompt": "hi", "chat_template_kwargs": {"a": [1]}}, {"a": [1]}),
        (
            {"url": "/v1/responses", "body": {"input": "hi", "reasoning": {"effort": "low"}}},
            {"reasoning_effort": "low"},
        ),
    ):
        [request] = read(line)
        assert isinstance(request, BatchRequest) and request.request.template_vars == wanted


def test_the_command_lines_variables_are_for_requests_that_go_through_the_template_and_do_not_say_themselves() -> None:
    def variables(line: Any, raw: bool = False) -> Any:
        encoded = line if isinstance(line, bytes) else json.dumps(line).encode()
        usual = {"enable_thinking": False, "a": 1}
        [request] = BatchReader([encoded], DEFAULTS, jsonl=None, raw=raw, template_vars=usual)
        assert isinstance(request, BatchRequest)
        return request.request.template_vars

    usual = {"enable_thinking": False, "a": 1}
    assert variables(b"plain") == variables({"prompt": "hi"}) == variables({"messages": HI}) == usual
    assert variables({"url": "/v1/responses", "body": {"input": "hi"}}) == usual
    assert variables({"messages": HI, "chat_template_kwargs": {"a": 2}}) == {**usual, "a": 2}
    assert variables({"prompt": [1]}) == variables({"prompt": "hi"}, raw=True) == variables(b"plain", raw=True) == {}
    assert variables({"url": "/v1/completions", "body": {"prompt": "hi"}}) == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": HI, "reasoning_effort": 3}, "reasoning_effort is 3"),
        ({"messages": HI, "chat_template_kwargs": [1]}, "chat_template_kwargs is [1]"),
        ({"url": "/v1/responses", "body": {"input": "hi", "reasoning": {"budget": 9}}}, "'budget'"),
        ({"prompt": [1, 2], "reasoning_effort": "low"}, "which this prompt does not go through"),
        (
            {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "a", "reasoning_effort": "low"}},
            "which this prompt does not go through",
        ),
    ],
)
def test_variables_that_no_template_gets_are_refused(line: dict[str, Any], said: str) -> None:
    [bad] = read(line)
    assert isinstance(bad, InvalidLine) and said in bad.message


def test_ids_are_read_ahead_of_files_only(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    with pytest.raises(InvalidRequest, match="lines 1 and 2 both have the id 'a'"):
        read_ids(str(tmp_path / "in"), InputFormat.auto)
    plain = read_ids(str(tmp_path / "in"), InputFormat.lines)
    assert plain is not None and list(plain.lines.values()) == [1, 2]
    assert read_ids("-", InputFormat.auto) is None
