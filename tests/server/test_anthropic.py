"""`/v1/messages`, asked with the `anthropic` package: streamed and whole, with tools, thoughts and errors."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock

from cortexmlx import Engine, SamplingParams
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import ServerSettings, app
from cortexmlx.server.listening import HttpServer, open_listener
from support.engine.held import hold_long_answers
from support.models.calling import write_calling
from support.models.thinking import SWITCHED, dictated, write_thinking
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


def test_a_quiet_stream_pings(serve: Any, engine: Engine) -> None:
    let_go = hold_long_answers(engine, tokens=3)
    try:
        with httpx.Client(base_url=serve(quiet=0.05), timeout=PATIENCE, trust_env=False) as http:
            body = {"max_tokens": 30, "messages": USER, "stream": True}
            with http.stream("POST", "/v1/messages", json=body) as reply:
                lines = reply.iter_lines()
                assert next(line for line in lines if "ping" in line) == "event: ping"
                assert next(lines) == 'data: {"type": "ping"}'
                let_go()
                assert [line for line in lines if line][-1] == 'data: {"type":"message_stop"}'
    finally:
        let_go()


# -- /v1/messages as agents ask it: bodies like Claude Code's, thoughts that come back, and what they share -----------


BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "a file", "pattern": "^(?!/dev).+$", "format": "uri"},
        "mode": {"anyOf": [{"const": "r"}, {"const": "w"}, {"type": "null"}]},
        "answers": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    },
    "required": ["path"],
    "additionalProperties": False,
}
EPHEMERAL = {"type": "ephemeral"}


def agents_body(conversation: str, **more: Any) -> dict[str, Any]:
    """A body like that of an agent, with the line that differs in each conversation."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{conversation}; cch={conversation};"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Use your tools. " * 8, "cache_control": {**EPHEMERAL, "ttl": "1h"}},
    ]
    text = {"type": "text", "text": "Hello?", "cache_control": EPHEMERAL}
    messages = [{"role": "user", "content": [text]}, {"role": "system", "content": "It is Monday."}]
    tools = [{"name": f"tool_{n}", "description": "does it", "input_schema": copy.deepcopy(SCHEMA)} for n in range(4)]
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "system": system,
        "messages": messages,
        "tools": tools,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "stream": True,
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling(tmp_path_factory.mktemp("calling") / "tiny", "hermes", max_position_embeddings=65536)


def test_an_agents_body_is_answered_and_conversations_share_its_beginning(http: httpx.Client) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": BETAS}
    more = {"max_tokens": 2, "stream": False}
    first = http.post("/v1/messages?beta=true", json=agents_body("a1", **more), headers=headers)
    assert first.status_code == 200, first.text
    assert http.post("/v1/messages?beta=true", json=agents_body("a1", max_tokens=2)).text.endswith("\n\n")
    other = http.post("/v1/messages?beta=true", json=agents_body("b2", **more)).json()["usage"]
    assert other["cache_read_input_tokens"] > 0.9 * (other["input_tokens"] + other["cache_read_input_tokens"])
    counted = http.post("/v1/messages/count_tokens", json=agents_body("c3")).json()
    assert counted["input_tokens"] == other["input_tokens"] + other["cache_read_input_tokens"]


def test_the_packages_tool_runner_goes_on_without_threads(serve: Any) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather."""
        return city

    web = anthropic.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    with anthropic.Anthropic(base_url=serve(), api_key="none", max_retries=0, http_client=web) as client:
        asked: Any = {"model": "tiny", "max_tokens": 2, "messages": USER, "tools": [weather]}
        assert client.beta.messages.tool_runner(**asked).until_done().role == "assistant"
        with pytest.raises(anthropic.BadRequestError, match="'thread' is not served") as refused:
            client.post("/v1/messages", body={**asked, "tools": [], "thread": {"type": "create"}}, cast_to=object)
    assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]


def test_a_tool_whose_schema_cannot_be_enforced_ends_no_conversation(http: httpx.Client) -> None:
    odd: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(?=x)"}, "b": {"$ref": "#/x"}},
    }
    tools = [{"name": "odd", "input_schema": odd}, {"name": "plain", "input_schema": SCHEMA}]
    body = agents_body("a1", tools=tools, max_tokens=30, stream=False, tool_choice={"type": "tool", "name": "odd"})
    reply = http.post("/v1/messages", json=body)
    assert reply.status_code == 200 and any("'odd'" in note for note in reply.json()["notes"]), reply.text
    tools[0]["strict"] = True
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400 and "'odd'" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_thinking(tmp_path_factory.mktemp("thinking") / "tiny", SWITCHED, max_position_embeddings=4096)
    with Engine(str(folder), kv_memory="16MB", max_rows=2) as engine:
        yield engine


@pytest.fixture
def thinking(thinker: Engine) -> Iterator[httpx.Client]:
    """A client of a model that thinks and answers, whatever it is asked."""
    params = dictated(thinker, "<think>one two</think>three")
    listening = HttpServer(
        app(thinker, ServerSettings(keys={"a": "ann", "b": "bob"}, defaults=RequestDefaults(params))),
        open_listener("127.0.0.1", 0),
    )
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        with httpx.Client(
            base_url=listening.url, timeout=PATIENCE, trust_env=False, headers={"x-api-key": "a"}
        ) as http:
            yield http
    finally:
        listening.stop()
        thread.join(PATIENCE)


def test_thoughts_come_back_as_the_client_got_them(thinking: httpx.Client) -> None:
    body = {"max_tokens": 100, "messages": USER, "thinking": {"type": "enabled", "budget_tokens": 50}}
    answer = thinking.post("/v1/messages", json=body).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert (answer["content"][0]["thinking"], answer["content"][1]["text"]) == ("one two", "three")
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0

    def again(client: str = "a", **changed: Any) -> httpx.Response:
        thought = {**answer["content"][0], **changed}
        turns = [*USER, {"role": "assistant", "content": [thought, answer["content"][1]]}, *USER]
        return thinking.post("/v1/messages/count_tokens", json={"messages": turns}, headers={"x-api-key": client})

    without = again(type="redacted_thinking").json()["input_tokens"]
    assert again().status_code == 200
    for foreign in (again("b"), again(thinking="other"), again(signature=""), again(signature="x" * 44)):
        assert foreign.status_code == 200 and foreign.json()["input_tokens"] == without


def test_thoughts_are_left_out_if_the_client_wants_that(thinking: httpx.Client) -> None:
    asked = {"type": "adaptive", "display": "omitted"}
    answer = thinking.post("/v1/messages", json={"max_tokens": 100, "messages": USER, "thinking": asked}).json()
    assert answer["content"][0]["thinking"] == "" and answer["content"][1]["text"] == "three"
    turns = [*USER, {"role": "assistant", "content": answer["content"]}, *USER]
    assert thinking.post("/v1/messages/count_tokens", json={"messages": turns}).status_code == 200


def test_thoughts_can_be_switched_off(thinker: Engine, thinking: httpx.Client) -> None:
    def count(**more: Any) -> int:
        tokens: int = thinking.post("/v1/messages/count_tokens", json={"messages": USER, **more}).json()["input_tokens"]
        return tokens

    closed = len(thinker.encode("<think>\n\n</think>\n\n"))
    on = count(thinking={"type": "enabled", "budget_tokens": 9})
    assert count(thinking={"type": "disabled"}) == on + closed
    assert count(thinking={"type": "adaptive"}, output_config={"effort": "max"}) == on


def test_a_model_without_thoughts_ignores_thinking(http: httpx.Client) -> None:
    for asked in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        body = {"max_tokens": 2, "messages": USER, "thinking": asked, "output_config": {"effort": "low"}}
        assert http.post("/v1/messages", json=body).status_code == 200


def test_the_servers_own_defaults_make_one_answer(ask: Any) -> None:
    params = replace(SamplingParams(), n=2, logprobs=1)
    with ask(defaults=RequestDefaults(params)) as http:
        for stream in (False, True):
            assert (
                http.post("/v1/messages", json={"max_tokens": 2, "messages": USER, "stream": stream}).status_code == 200
            )
