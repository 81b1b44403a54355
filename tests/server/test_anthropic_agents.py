"""`/v1/messages` as agents ask it: bodies like Claude Code's, thoughts that come back, and what they share."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import ServerSettings, app
from support.clients.listening import listening
from support.models.calling import write_calling
from support.models.thinking import SWITCHED, dictated, write_thinking
from support.patience import PATIENCE

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
    settings = ServerSettings(keys={"a": "ann", "b": "bob"}, defaults=RequestDefaults(params))
    with (
        listening(app(thinker, settings)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, headers={"x-api-key": "a"}) as http,
    ):
        yield http


USER: Any = [{"role": "user", "content": "Hello?"}]


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


def test_the_servers_own_defaults_make_one_answer(ask: Any) -> None:
    params = replace(SamplingParams(), n=2, logprobs=1)
    with ask(defaults=RequestDefaults(params)) as http:
        for stream in (False, True):
            assert (
                http.post("/v1/messages", json={"max_tokens": 2, "messages": USER, "stream": stream}).status_code == 200
            )
