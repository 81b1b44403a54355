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


def test_a_key_is_needed_where_there_are_keys(ask: Any) -> None:
    http = ask(keys={"right": "a", "other": "b"})
    for header, value, status in (
        ("x", "", 401),
        *(("Authorization", value, 401) for value in ("Bearer wrong", "Basic right", "Bearer")),
        *(("authorization", value, 200) for value in ("Bearer right", "bearer right")),
        ("x-api-key", "right", 200),
        ("x-api-key", "RIGHT", 401),
    ):
        headers = {header: value}
        for reply in (http.post(CHAT, json=BODY, headers=headers), http.get("/v1/models", headers=headers)):
            assert reply.status_code == status, (header, value)
            assert status == 200 or "API key" in reply.json()["error"]["message"]
            assert status == 200 or reply.headers["www-authenticate"] == "Bearer"
    assert http.get("/health").status_code == 200


def test_only_names_of_this_machine_are_served_without_keys(ask: Any) -> None:
    """A page of the web may have a name of its own that leads here (DNS rebinding), also as its origin."""
    http = ask()
    for host in ("localhost", "localhost:1234", "127.0.0.1:8000", "[::1]:8000"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200, host
    foreign = "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil.example"
    for host in (*foreign, "[evil]", ""):
        for path in ("/", "/live", "/metrics", "/v1/models"):
            assert http.get(path, headers={"Host": host}).status_code == 403, host
        assert http.post(CHAT, json=BODY, headers={"Host": host, "Origin": f"http://{host}"}).status_code == 403
    assert ask(keys={"k": "a"}).get("/v1/models", headers={"Host": "mac.local", "x-api-key": "k"}).status_code == 200


def test_pages_ask_only_if_they_are_allowed(ask: Any) -> None:
    for origins, origin, status in (
        *(((), origin, 403) for origin in ("https://evil.example", "null", "http://[::1")),
        (("https://app.example",), "https://app.example", 200),
        (("https://app.example",), "https://app.example.evil", 403),
        (("*",), "https://any.example", 200),
    ):
        http = ask(origins=origins)
        reply = http.post(CHAT, json=BODY, headers={"Origin": origin})
        assert reply.status_code == status, origin
        network = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
        before = http.options(CHAT, headers={"Origin": origin, **network})
        if status == 200:
            assert reply.headers["access-control-allow-origin"] == origin
            assert before.status_code == 204 and "POST" in before.headers["access-control-allow-methods"]
        else:
            assert before.status_code == http.get("/live", headers={"Origin": origin}).status_code == 403
            assert not [each for each in (*reply.headers, *before.headers) if each.startswith("access-control")]


def test_a_page_of_the_server_itself_may_ask(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"Origin": "http://localhost"}).status_code == 200


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
