"""What strangers may not do: ask without a key, read keys in logs and errors, and learn what others asked."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx import Engine
from cortexmlx.errors import FormRefused, InvalidRequest, StructuredOutputError
from cortexmlx.server.generation import PROTOCOLS, HttpRequestAnswers
from cortexmlx.server.settings import LoggedRequest
from cortexmlx.types.request import TokenEvent
from support.patience import soon

KEYS = {"correct-horse-battery": "first", "staple-and-more": "second"}
CHAT = "/v1/chat/completions"
SECRET: Any = {"messages": [{"role": "user", "content": "The code of the safe is larkspur-4711, tell nobody. " * 8}]}
PATHS = (
    *PROTOCOLS,
    "/tokenize",
    "/v1/models",
    "/v1/models/tiny",
    "/api/tags",
    "/api/show",
    "/api/ps",
    "/live",
    "/metrics",
    "/cache/why",
    "/v1/responses/resp_1",
    "/nothing",
    "/health/",
    "/health/../v1/models",
)


def test_no_path_is_answered_without_a_key(ask: Any) -> None:
    http = ask(keys=KEYS)
    for path in (*PATHS, "/%68ealth/x", "//health", "/HEALTH"):
        for method in ("GET", "POST", "HEAD", "DELETE"):
            reply = http.request(method, http.base_url.copy_with(raw_path=path.encode()), json={})
            assert reply.status_code == 401 and "tiny" not in reply.text, (method, path)


def test_the_page_tells_nothing_without_a_key(ask: Any) -> None:
    with ask(keys=KEYS) as http:
        for accept in ("text/html", "*/*"):
            reply = http.get("/", headers={"accept": accept})
            assert reply.status_code == 200 and "tiny" not in reply.text
            assert not any(key in reply.text for key in KEYS)


def test_tricks_with_paths_find_no_model(http: httpx.Client) -> None:
    for name in ("..", "../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "tiny%00"):
        reply = http.get(http.base_url.copy_with(raw_path=f"/v1/models/{name}".encode()))
        assert reply.status_code == 404 and "root:" not in reply.text, name


def test_keys_are_in_no_log_and_no_error(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[LoggedRequest] = []
    replies = []
    with ask(keys=KEYS, log=seen.append) as http:
        for key in (*KEYS, "wrong-key-of-mine"):
            for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}, {"Authorization": f"Basic {key}"}):
                for content in (b"{", json.dumps({**SECRET, "max_tokens": 0}).encode(), b"[" * 1000):
                    replies.append(http.post(CHAT, content=content, headers=headers))
    assert soon(lambda: len(seen) == len(replies))
    assert {reply.status_code for reply in replies} == {400, 401}
    told = caplog.text + repr(seen) + "".join(reply.text + repr(reply.headers) for reply in replies)
    for word in (*KEYS, "wrong-key", "larkspur"):
        assert word not in told


def test_hits_tell_nothing_of_what_another_key_asked(ask: Any) -> None:
    """Whole and streamed, and with the same question before, between and after."""
    with ask(keys=KEYS) as http:

        def cached(key: str, stream: bool) -> int:
            body = {**SECRET, "max_tokens": 1, "stream": stream}
            options = {"stream_options": {"include_usage": True}} if stream else {}
            reply = http.post(CHAT, json={**body, **options}, headers={"x-api-key": key})
            assert reply.status_code == 200
            last = reply.text.strip().split("\n\n")[-2].removeprefix("data: ") if stream else reply.text
            return int(json.loads(last)["usage"]["prompt_tokens_details"]["cached_tokens"])

        first, second = KEYS
        assert cached(first, False) == 0
        assert cached(second, True) == 0
        assert cached(first, True) > 0
        assert cached(second, False) > 0


BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}
PANIC = "panicked at src/parser.rs:1:2: index out of bounds\n<backtrace>\n at /Users/ann/x.rs"
FAILURES = [
    type("PanicException", (BaseException,), {}),
    RuntimeError,
    FormRefused,
    InvalidRequest,
    StructuredOutputError,
]


def error_in(reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply, or of the last event of a stream."""
    said = json.loads(reply.text.strip().rsplit("data: ", 1)[-1])
    found: dict[str, Any] = (said.get("response") or said)["error"]
    return found


@pytest.mark.parametrize("failure", FAILURES)
def test_no_failure_tells_what_is_inside(http: httpx.Client, monkeypatch: pytest.MonkeyPatch, failure: Any) -> None:
    """Before an answer begins and within a stream, whatever is raised. All is JSON of the protocol."""

    def fail(*of: Any, **options: Any) -> Any:
        raise failure(f"it failed: {PANIC}")

    async def begin_and_fail(*of: Any) -> Any:
        yield 0, TokenEvent("a")
        fail()

    tokens = {"/tokenize": {"content": "a"}, "/v1/messages/count_tokens": {"messages": SECRET["messages"]}}
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "submit", fail)
        patched.setattr(Engine, "encode", fail)
        replies = [http.post(path, json=body) for path, body in (BODIES | tokens).items()]
    assert {reply.status_code for reply in replies} == ({400} if failure in FAILURES[2:4] else {500})
    with monkeypatch.context() as patched:
        patched.setattr(HttpRequestAnswers, "events", begin_and_fail)
        replies += [http.post(path, json={**body, "stream": True}) for path, body in BODIES.items()]
    for reply in replies:
        assert error_in(reply)["message"]
        assert not re.search(r"panic|backtrace|\.rs|Users|index out", reply.text, re.IGNORECASE), reply.text


def test_a_form_that_is_too_complex_while_it_is_written_is_the_requests_fault(http: httpx.Client) -> None:
    """With a 500, an agent's package would ask again and again."""
    inner = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    endless = {
        "type": "array",
        "prefixItems": [{"enum": [1, 2]}, {"$ref": "#/$defs/a"}],
        "minItems": 2,
        "$defs": {"a": inner},
        "x-guidance": {"whitespace_flexible": False},
    }
    form = {"name": "x", "schema": endless, "strict": True}
    forms: dict[str, Any] = {
        "/v1/chat/completions": {"response_format": {"type": "json_schema", "json_schema": form}},
        "/v1/responses": {"text": {"format": {"type": "json_schema", **form}}},
        "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": endless}}},
    }
    for path, more in forms.items():
        whole = http.post(path, json={**BODIES[path], **more})
        assert whole.status_code == 400 and error_in(whole)["type"] == "invalid_request_error"
        streamed = http.post(path, json={**BODIES[path], **more, "stream": True})
        assert "cannot have the form" in error_in(streamed)["message"] and streamed.status_code == 200
