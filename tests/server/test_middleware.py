"""Who may ask, what is logged of it, and paths as clients write them."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.server import ServerSettings
from cortexmlx.server.settings import LoggedRequest
from support.patience import PATIENCE, soon

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
    check = http.build_request("GET", "/v1/models")
    del check.headers["host"]
    assert http.send(check).status_code == 200, "a load balancer's, in HTTP/1.0"
    foreign = "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil.example"
    for host in (*foreign, "[evil]", ""):
        for path in ("/", "/live", "/metrics", "/v1/models"):
            assert http.get(path, headers={"Host": host}).status_code == 403, host
        assert http.post(CHAT, json=BODY, headers={"Host": host, "Origin": f"http://{host}"}).status_code == 403
    assert ask(keys={"k": "a"}).get("/v1/models", headers={"Host": "mac.local", "x-api-key": "k"}).status_code == 200


def test_pages_ask_only_if_they_are_allowed(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
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
            assert caplog.messages.count(f"pages of {origin!r} were refused: --cors {origin} allows them") == 1
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


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerSettings(keys={"secret": "a"}))


# Each request is logged once, with its tokens, and without its texts and keys.


SECRET: Any = {"messages": [{"role": "user", "content": "A secret question, quite long " * 9}], "max_tokens": 5}


def test_requests_are_logged(ask: Any) -> None:
    seen: list[LoggedRequest] = []
    with ask(log=seen.append, keys={"sekret": "logged"}) as http:
        http.headers["x-api-key"] = "sekret"
        http.post("/v1/chat/completions", json={**SECRET, "seed": 1})
        http.post("/v1/chat/completions", json={**SECRET, "stream": True})
        http.post("/v1/completions", content=b"{")
        http.get("/v1/models", headers={"x-api-key": "wrong"})
    assert soon(lambda: len(seen) == 4)
    assert [(each.method, each.status) for each in seen] == [("POST", 200), ("POST", 200), ("POST", 400), ("GET", 401)]
    first, second = seen[0].tokens, seen[1].tokens
    assert first is not None and second is not None and first.cached == 0 < second.cached
    assert first.prompt == second.prompt and 0 < first.answer <= 5
    assert seen[2].tokens is None and "sekret" not in repr(seen) and "secret" not in repr(seen)


# Paths as clients write them: without `/v1`, with it twice, with a slash too many; and compressed bodies.


SHORT: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def test_a_path_is_served_as_clients_write_it(http: httpx.Client) -> None:
    url = str(http.base_url).rstrip("/")
    for path in ("/chat/completions", f"{CHAT}/", "//chat//completions", "/v1//chat/completions", f"/v1{CHAT}"):
        assert http.post(url + path, json=SHORT).status_code == 200, path
    for path in ("/messages", "/v1/v1/messages", "/v1/messages/", "/messages/count_tokens"):
        assert http.post(path, json=SHORT).status_code == 200, path
        assert http.post(path, json={}).json()["type"] == "error", path
    name = http.get("/models").json()["data"][0]["id"]
    for path in (f"/models/{name}", f"/v1/models/{name}/", f"/v1/v1/models/{name}"):
        assert http.get(path).json()["id"] == name, path
    stored = http.post("/responses", json={"input": "hi", "max_output_tokens": 1}).json()["id"]
    assert http.get(f"/responses/{stored}/input_items").status_code == 200
    assert http.post("/tokenize/", json={"content": "a"}).status_code == 200
    for path in ("/v1", "/v1/", "/v2/chat/completions", "/chat", "/v1chat/completions", f"/x{CHAT}", "/v1/health"):
        reply = http.post(path, json=SHORT)
        assert reply.status_code == 404 and f"{path} is not served" in reply.json()["error"]["message"], path


def test_no_way_to_write_a_path_goes_around_the_key(serve: Any) -> None:
    url = serve(keys={"k": "ann"})
    with httpx.Client(timeout=PATIENCE, trust_env=False) as http:
        for path in ("/models", "//models", "/v1/models/", "/v1/v1/models", "/health/../models", "//", "/health//"):
            assert http.get(url + path).status_code == 401, path


@pytest.fixture
def bounded(ask: Any) -> Any:
    with ask(max_body=1 << 20) as http:
        yield lambda data, coding: http.post(CHAT, content=data, headers={"content-encoding": coding})


def test_compressed_bodies_are_read_within_the_bound(bounded: Any) -> None:
    plain = json.dumps(SHORT).encode()
    for data, coding in (
        (gzip.compress(plain), "gzip"),
        (zlib.compress(plain), "Deflate"),
        (plain, "identity"),
        (plain, ""),
    ):
        assert bounded(data, coding).status_code == 200, coding
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 1 << 20 and bounded(bomb, "gzip").status_code == 413
    whole = gzip.compress(plain)
    for data in (plain, whole[:-3], b"", whole + b"x", whole[:20] + b"\0" * 20, gzip.compress(b"\xff")):
        assert bounded(data, "gzip").status_code == 400, data
    for coding in ("br", "zstd", "gzip, gzip", "x" * 900):
        reply = bounded(whole, coding)
        assert reply.status_code == 415 and len(reply.text) < 400, coding
        assert "gzip" in reply.headers["accept-encoding"]
