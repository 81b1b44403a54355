"""Paths as clients write them: without `/v1`, with it twice, with a slash too many; and compressed bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx2 as httpx
import pytest

from support.patience import PATIENCE

BODY: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CHAT = "/v1/chat/completions"


def test_a_path_is_served_as_clients_write_it(http: httpx.Client) -> None:
    url = str(http.base_url).rstrip("/")
    for path in ("/chat/completions", f"{CHAT}/", "//chat//completions", "/v1//chat/completions", f"/v1{CHAT}"):
        assert http.post(url + path, json=BODY).status_code == 200, path
    for path in ("/messages", "/v1/v1/messages", "/v1/messages/", "/messages/count_tokens"):
        assert http.post(path, json=BODY).status_code == 200, path
        assert http.post(path, json={}).json()["type"] == "error", path
    name = http.get("/models").json()["data"][0]["id"]
    for path in (f"/models/{name}", f"/v1/models/{name}/", f"/v1/v1/models/{name}"):
        assert http.get(path).json()["id"] == name, path
    stored = http.post("/responses", json={"input": "hi", "max_output_tokens": 1}).json()["id"]
    assert http.get(f"/responses/{stored}/input_items").status_code == 200
    assert http.post("/tokenize/", json={"content": "a"}).status_code == 200
    for path in ("/v1", "/v1/", "/v2/chat/completions", "/chat", "/v1chat/completions", f"/x{CHAT}", "/v1/health"):
        reply = http.post(path, json=BODY)
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
    plain = json.dumps(BODY).encode()
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
