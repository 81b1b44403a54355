"""`/v1/messages`, asked with the `anthropic` package: streamed and whole, with tools, thoughts and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock

from cortexmlx import Engine, SamplingParams
from support.patience import PATIENCE

USER: Any = [{"role": "user", "content": "Hello?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "the weather of a city",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASKED: Any = {"model": "tiny", "max_tokens": 20, "messages": USER, "extra_body": {"temperature": 0}}


@pytest.fixture
def claude(serve: Any) -> Iterator[anthropic.Anthropic]:
    with package(serve()) as made:
        yield made


def package(url: str, key: str = "none") -> anthropic.Anthropic:
    web = anthropic.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=web)


def test_a_message_is_the_engines_answer(claude: anthropic.Anthropic, engine: Engine) -> None:
    answer = claude.messages.create(**ASKED)
    judge = engine.generate(USER, SamplingParams(max_tokens=20))
    Message.model_validate(answer.model_dump(), strict=True)
    [block] = answer.content
    assert isinstance(block, TextBlock) and block.text == judge.text
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == judge.usage.prompt_tokens
    assert usage.output_tokens == judge.usage.completion_tokens
    assert answer.stop_reason == ("max_tokens" if judge.finish_reason.value == "length" else "end_turn")


def test_a_stream_says_the_same(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**ASKED)
    with claude.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds
    assert final.content[0].model_dump(exclude={"parsed_output"}) == whole.content[0].model_dump()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_call_is_streamed_and_whole_and_its_result_is_read(claude: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "max_tokens": 300, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
    whole = claude.messages.create(**asked)
    [call] = [block for block in whole.content if isinstance(block, ToolUseBlock)]
    assert call.input["city"] in ("Paris", "Rome") and whole.stop_reason == "tool_use"
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    [streamed] = [block for block in final.content if isinstance(block, ToolUseBlock)]
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns: Any = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "none"}}).content


def test_what_is_counted_is_what_is_used(claude: anthropic.Anthropic) -> None:
    turns: Any = [
        *USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
    ]
    more: list[dict[str, Any]] = [
        {},
        {"system": "Be kind."},
        {"tools": [WEATHER]},
        {"messages": turns, "tools": [WEATHER]},
    ]
    counts = []
    for each in more:
        asked = {"model": "tiny", "messages": USER, **each}
        counted = claude.messages.count_tokens(**asked)
        usage = claude.messages.create(**{**asked, "max_tokens": 1}).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counts.append(counted.input_tokens)
    assert counts == sorted(set(counts))


def test_the_package_raises_its_own_errors(serve: Any, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as raised:
        claude.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 9000}]})
    assert raised.value.type == "invalid_request_error" and (raised.value.request_id or "").startswith("req_")
    with pytest.raises(anthropic.NotFoundError, match="did you mean 'tiny'"):
        claude.messages.create(**{**ASKED, "model": "tinny"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]: the last message"):
        claude.messages.create(**{**ASKED, "messages": [*USER, {"role": "assistant", "content": "It"}]})
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: the type 'web_search_20250305'"):
        claude.messages.create(**ASKED, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    url = serve(keys={"secret": "ann"})
    with package(url, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError, match="API key"):
        stranger.messages.create(**ASKED)
    with package(url, "secret") as known:
        assert known.messages.create(**ASKED).content


def test_every_reply_has_the_id_of_its_request(http: httpx.Client) -> None:
    body = {"max_tokens": 1, "messages": USER}
    whole = http.post("/v1/messages?beta=true", json=body)
    assert whole.headers["request-id"].removeprefix("req_") == whole.json()["id"].removeprefix("msg_")
    wrong = http.post("/v1/messages", json={})
    assert wrong.status_code == 400 and wrong.json()["request_id"] == wrong.headers["request-id"]
    assert http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert http.post("/v1/messages/batches", json={}).json()["error"]["type"] == "not_found_error"
    with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as reply:
        assert reply.headers["request-id"].startswith("req_") and reply.headers["content-type"].startswith(
            "text/event-"
        )
        lines = [line for line in reply.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    assert names == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::2]]
    assert names[-1] == "message_stop"
    assert http.head("/").status_code == 200
