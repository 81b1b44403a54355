"""Who may ask: keys, hosts, and pages of the web."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from cortexmlx import Engine
from cortexmlx.errors import InvalidRequest
from cortexmlx.server import ServerSettings, app

BODY = {"messages": [{"role": "user", "content": "Hello there, who are you?" * 8}], "max_tokens": 1}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic right"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer right"}, 200),
        ({"authorization": "bearer right"}, 200),
        ({"x-api-key": "right"}, 200),
        ({"x-api-key": "RIGHT"}, 401),
    ],
)
def test_a_key_is_needed_where_there_are_keys(serve: Any, headers: dict[str, str], status: int) -> None:
    with httpx.Client(base_url=serve(keys={"right": "a", "other": "b"}), trust_env=False) as http:
        for reply in (http.post(CHAT, json=BODY, headers=headers), http.get("/v1/models", headers=headers)):
            assert reply.status_code == status
            assert status == 200 or "API key" in reply.json()["error"]["message"]
        assert http.get("/health").status_code == 200


def test_keys_share_no_prefixes(serve: Any, engine: Engine) -> None:
    with httpx.Client(base_url=serve(keys={"one": "first", "two": "second"}), trust_env=False) as http:

        def cached(key: str) -> int:
            reply = http.post(CHAT, json=BODY, headers={"x-api-key": key}).json()
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("one") == 0 and cached("one") > 0
        assert cached("two") == 0 and cached("two") > 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("[evil]", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_served_without_keys(serve: Any, host: str, status: int) -> None:
    with httpx.Client(base_url=serve(), trust_env=False) as http:
        assert http.get("/v1/models", headers={"Host": host}).status_code == status


def test_with_a_key_any_name_is_served(serve: Any) -> None:
    with httpx.Client(base_url=serve(keys={"k": "a"}), trust_env=False) as http:
        assert http.get("/v1/models", headers={"Host": "mac.local", "x-api-key": "k"}).status_code == 200


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        ((), "https://evil.example", 403),
        ((), "null", 403),
        ((), "http://[::1", 403),
        (("https://app.example",), "https://app.example", 200),
        (("https://app.example",), "https://app.example.evil", 403),
        (("*",), "https://any.example", 200),
    ],
)
def test_pages_ask_only_if_they_are_allowed(serve: Any, origins: tuple[str, ...], origin: str, status: int) -> None:
    with httpx.Client(base_url=serve(origins=origins), trust_env=False) as http:
        reply = http.post(CHAT, json=BODY, headers={"Origin": origin})
        assert reply.status_code == status
        before = http.options(CHAT, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
        if status == 200:
            assert reply.headers["access-control-allow-origin"] == origin
            assert before.status_code == 204 and "POST" in before.headers["access-control-allow-methods"]
        else:
            assert "access-control-allow-origin" not in reply.headers and before.status_code == 403


def test_a_page_of_the_server_itself_may_ask(serve: Any) -> None:
    url = serve()
    with httpx.Client(base_url=url, trust_env=False) as http:
        assert http.get("/v1/models", headers={"Origin": url}).status_code == 200


def test_wrong_settings_are_refused() -> None:
    """An origin that no browser sends would never be let in, and nobody would be told why."""
    wrong: list[dict[str, Any]] = [{"keys": {key: "a"}} for key in ("", "k ", "é")] + [{"max_body": 0}]
    never = ["app.example", "localhost:3000", "https://", "https://a.example/", "https://a.example/x", "//a.example"]
    never += ["https://u@a.example", "HTTPS://a.example", "https://A.example", "https://*.example", "", "https://a b"]
    never += ["https://a.example?x", "https://a.example#x", "https://a.example:port", "https://a,https://b", "http:a"]
    for options in wrong + [{"origins": (origin,)} for origin in never]:
        with pytest.raises(InvalidRequest):
            ServerSettings(**options)
    usual = ("*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md")
    assert ServerSettings(origins=(*usual, "chrome-extension://abc")).origins[:6] == usual


def test_mounted_in_another_application_it_is_the_same(engine: Engine) -> None:
    whole = Starlette(routes=[Mount("/ai", app(engine, keys={"k": "a"}))])

    async def ask() -> None:
        transport = httpx.ASGITransport(app=whole)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/ai/health")).status_code == 200
            assert (await http.get("/ai/v1/models")).status_code == 401
            reply = await http.post(f"/ai{CHAT}", json=BODY, headers={"x-api-key": "k"})
            assert reply.status_code == 200 and reply.json()["choices"]

    asyncio.run(ask())


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerSettings(keys={"secret": "a"}))
