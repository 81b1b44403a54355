"""What strangers may not do: ask without a key, read keys in logs and errors, and learn what others asked."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.server.protocols import PROTOCOLS
from cortexmlx.server.web.logged import Logged
from support.patience import PATIENCE, soon

KEYS = {"correct-horse-battery": "first", "staple-and-more": "second"}
CHAT = "/v1/chat/completions"
SECRET: Any = {"messages": [{"role": "user", "content": "The code of the safe is 4711, tell nobody. " * 8}]}
PATHS = (
    *PROTOCOLS,
    "/tokenize",
    "/v1/models",
    "/v1/models/tiny",
    "/live",
    "/metrics",
    "/v1/responses/resp_1",
    "/nothing",
    "/health/",
    "/health/../v1/models",
)


@pytest.mark.parametrize("path", [*PATHS, "/%68ealth/x", "//health", "/HEALTH"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE"])
def test_no_path_is_answered_without_a_key(serve: Any, path: str, method: str) -> None:
    with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
        url = httpx.URL(serve(keys=KEYS)).copy_with(raw_path=path.encode())
        assert http.request(method, url, json={}).status_code == 401


def test_the_page_tells_nothing_without_a_key(serve: Any) -> None:
    with httpx.Client(base_url=serve(keys=KEYS), trust_env=False, timeout=PATIENCE) as http:
        for accept in ("text/html", "*/*"):
            reply = http.get("/", headers={"accept": accept})
            assert reply.status_code == 200 and "tiny" not in reply.text
            assert not any(key in reply.text for key in KEYS)


@pytest.mark.parametrize("name", ["..", "../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "tiny%00"])
def test_tricks_with_paths_find_no_model(http: httpx.Client, name: str) -> None:
    url = http.base_url.copy_with(raw_path=f"/v1/models/{name}".encode())
    reply = http.get(url)
    assert reply.status_code == 404 and "root:" not in reply.text


def test_keys_are_in_no_log_and_no_error(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[Logged] = []
    replies = []
    with httpx.Client(base_url=serve(keys=KEYS, log=seen.append), trust_env=False, timeout=PATIENCE) as http:
        for key in (*KEYS, "wrong-key-of-mine"):
            for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}, {"Authorization": f"Basic {key}"}):
                for content in (b"{", json.dumps({**SECRET, "max_tokens": 0}).encode(), b"[" * 1000):
                    replies.append(http.post(CHAT, content=content, headers=headers))
    assert soon(lambda: len(seen) == len(replies))
    assert {reply.status_code for reply in replies} == {400, 401}
    told = caplog.text + repr(seen) + "".join(reply.text + repr(reply.headers) for reply in replies)
    for word in (*KEYS, "wrong-key", "4711"):
        assert word not in told


def test_hits_tell_nothing_of_what_another_key_asked(serve: Any) -> None:
    """Whole and streamed, and with the same question before, between and after."""
    with httpx.Client(base_url=serve(keys=KEYS), trust_env=False, timeout=PATIENCE) as http:

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


def test_a_browser_asks_before_it_sends_and_is_told_no(serve: Any) -> None:
    headers = {
        "Origin": "https://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    with httpx.Client(base_url=serve(keys=KEYS, origins=("https://app.example",)), trust_env=False) as http:
        foreign = http.options(CHAT, headers=headers)
        assert foreign.status_code == 403
        assert not [name for name in foreign.headers if name.startswith("access-control")]
        own = http.options(CHAT, headers={**headers, "Origin": "https://app.example"})
        assert own.status_code == 204 and own.headers["access-control-allow-origin"] == "https://app.example"
        simple = http.post(
            CHAT, content=b"{}", headers={"Origin": "https://evil.example", "Content-Type": "text/plain"}
        )
        assert simple.status_code == 403


def test_a_name_that_leads_here_is_not_enough(serve: Any) -> None:
    """DNS rebinding: the page's own name, in the Host and in the Origin."""
    with httpx.Client(base_url=serve(), trust_env=False) as http:
        for host in ("evil.example:8000", "127.0.0.1.evil.example", "localhost@evil.example"):
            reply = http.post(CHAT, json=SECRET, headers={"Host": host, "Origin": f"http://{host}"})
            assert reply.status_code == 403
