"""Bodies that are wrong in any way: an answer or an error with a field's name, and never a bug."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.server.generation import PROTOCOLS
from support.patience import PATIENCE

TOOL: Any = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL: Any = {"name": "f", "arguments": {"a": 1}}
OPTIONS: Any = {"num_predict": 2, "temperature": 0, "seed": 1}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a"]}}},
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 2,
        "n": 2,
    },
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1, "seed": 1},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "u"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x", "namespace": None},
            {"type": "custom_tool_call_output", "call_id": "2", "output": "r"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}], "status": None},
            {"role": "developer", "content": "d"},
        ],
        "instructions": "i",
        "tools": [
            {"type": "function", **TOOL, "strict": None},
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **TOOL}]},
            {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "c"}]},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 1,
        "store": True,
        "truncation": "auto",
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "max_tool_calls": 2,
        "parallel_tool_calls": True,
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "max_output_tokens": 2,
        "stream": True,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "v"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "t", "citations": None}]},
            {"role": "system", "content": "x", "clear_at": "never"},
            {"role": "user", "content": "w"},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL["parameters"], "strict": False}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5, "display": "summarized"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"enum": ["a"]}}},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "temperature": 0.5,
        "top_k": 5,
        "stream": True,
    },
    "/tokenize": {"content": "a"},
    "/api/chat": {
        "model": "tiny:latest",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u", "images": ["AAEC"]},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [{"function": CALL}]},
            {"role": "tool", "content": "r", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "options": {**OPTIONS, "stop": ["x"], "top_k": 5, "repeat_penalty": 1.1, "repeat_last_n": 9, "num_ctx": 99},
        "format": {"enum": ["a"]},
        "think": "low",
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
    },
    "/api/generate": {
        "model": "tiny",
        "prompt": "p",
        "system": "s",
        "context": [100446978274084],
        "images": ["AAEC"],
        "raw": False,
        "options": OPTIONS,
        "format": "json",
        "think": True,
        "suffix": "",
        "stream": False,
    },
    "/api/embed": {"model": "tiny", "input": ["a", "b"], "truncate": True, "dimensions": 2, "options": {"num_ctx": 9}},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
    "/api/show": {"model": "tiny", "verbose": True},
    "/api/pull": {"model": "tiny", "insecure": False, "stream": False},
}
NAMES = ["zzz", "model", "messages", "stream", "previous_response_id", "id", "type"]
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 2**70, 0.5, -1e308, "", "a", "\0", "\ud800", "auto", [], [[]], {}),
    *(
        [None],
        [1],
        ["a"] * 3,
        {"a": 1},
        {"": None},
        {"type": "function"},
        [{"role": "user"}],
        {"type": "text", "text": "\udc00"},
        [{"type": "thinking", "thinking": "t", "signature": "s"}],
        "[" * 50,
        1e400,
    ),
]


ENDS = {"/v1/responses": ["event: response."], "/v1/messages": ["event: message_stop", "event: error"]}
"""How the last event of a path's stream begins, if it is not the usual one."""


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a body with each of its keys."""
    found = []
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def test_every_protocol_has_a_body_here() -> None:
    assert set(PROTOCOLS) <= set(BODIES)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("tries", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_body_is_a_bug(http: httpx.Client, path: str, tries: int) -> None:
    """The slow ones are 6,000 bodies of all paths, streamed and whole."""
    draw = random.Random(f"{path} {tries}")
    http.timeout = httpx.Timeout(PATIENCE)
    statuses = set()
    for _ in range(tries):
        body = copy.deepcopy(BODIES[path])
        for _ in range(draw.randrange(1, 3)):
            container, key = draw.choice(places(body))
            match draw.randrange(4):
                case 0 if isinstance(container, dict):
                    container[draw.choice(NAMES)] = copy.deepcopy(draw.choice(VALUES))
                case 1:
                    del container[key]
                    break
                case _:
                    container[key] = copy.deepcopy(draw.choice(VALUES))
        for name in ("max_tokens", "max_output_tokens"):
            if isinstance(body.get(name), (int, float)) and body[name] > 2:
                body[name] = 2
        if path.startswith("/v1"):
            body.setdefault("max_output_tokens" if path == "/v1/responses" else "max_tokens", 2)
        elif isinstance(options := body.get("options", {}), dict) and path in PROTOCOLS:
            tokens = options.get("num_predict")
            body["options"] = {**options, "num_predict": 2 if tokens is None or type(tokens) is int else tokens}
        if draw.random() < 0.5 and path in PROTOCOLS:
            body["stream"] = draw.random() < 0.5
        reply = http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
        assert reply.status_code in (200, 400, 404) or (reply.status_code, path) == (403, "/api/pull"), (
            body,
            reply.text,
        )
        if reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson":
            parts = [json.loads(line) for line in reply.text.splitlines()]
            assert path == "/api/pull" or [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True], body
        elif reply.status_code == 200 and path in PROTOCOLS and body.get("stream") and path.startswith("/v1"):
            last = reply.text.strip().rpartition("\n\n")[2]
            assert reply.text.endswith("\n\n") and any(end in last for end in ENDS.get(path, ["data: [DONE]"])), body
        elif reply.status_code == 200:
            assert reply.json()
        if reply.status_code != 200:
            assert reply.json()["error"] if path.startswith("/api") else reply.json()["error"]["message"]
        statuses.add(reply.status_code)
    assert statuses >= ({400} if path.startswith("/api/embed") else {200, 400})  # this model makes no vectors


LONG = "¤" * 3000
LONG_VALUES: list[Any] = [
    LONG,
    [LONG],
    [{LONG: LONG}],
    {LONG: 1},
    {f"{n}{'¤' * 90}": n for n in range(50)},
    {"type": LONG, "name": LONG, "function": LONG},
    {"type": "object", "properties": {LONG: {"type": LONG}}, "required": [LONG], LONG: LONG},
    [{"type": "function", "name": LONG, "function": {"name": LONG, "parameters": {LONG: 1}}}],
    {"type": "json_schema", "schema": {"$ref": LONG}, "json_schema": {"name": LONG, "schema": {"pattern": f"({LONG}"}}},
    [{"role": LONG, "content": LONG}, {"type": LONG}],
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("tries", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_no_error_says_more_than_200_characters_of_what_was_sent(http: httpx.Client, path: str, tries: int) -> None:
    draw, refused = random.Random(f"{path} {tries}"), 0
    http.timeout = httpx.Timeout(PATIENCE)
    chosen = [(place, value) for place in range(len(places(BODIES[path]))) for value in range(len(LONG_VALUES))]
    for place, value in draw.sample(chosen, min(len(chosen), tries)):
        body = copy.deepcopy(BODIES[path])
        container, key = places(body)[place]
        name = LONG if isinstance(container, dict) and draw.random() < 0.2 else key
        container[name] = LONG_VALUES[value]
        reply = http.post(path, json=body)
        if reply.status_code != 200:
            refused += 1
            assert reply.text.count("¤") <= 200 and len(reply.content) < 1500, (key, reply.status_code, reply.text)
    assert refused
