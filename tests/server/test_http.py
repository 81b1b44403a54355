"""Bodies of strangers are parsed within bounds, and the places for open requests are shared."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai import completions
from cortexmlx.server import generation, stored_responses
from cortexmlx.server import http as server_http
from cortexmlx.server.http import (
    MAX_DEPTH,
    MAX_VALUES,
    RequestLimiter,
    RequestPermit,
    RequestRefused,
    parse_json,
    server_sent_event,
)
from support.effort import examples
from support.patience import PATIENCE, soon

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_an_ordinary_body_is_what_json_says(body: dict[str, Any]) -> None:
    assert parse_json(json.dumps(body).encode()) == body


def nested(depth: int) -> bytes:
    """An object with lists in it, `depth` deep altogether."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_body_is_nested_so_deep_and_no_deeper() -> None:
    assert parse_json(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 500, 5_000, 200_000):
        with pytest.raises(InvalidRequest, match=r"nested more than 128 deep"):
            parse_json(nested(depth))


def test_a_body_has_so_many_values_and_no_more() -> None:
    def ids(count: int) -> bytes:
        return b'{"prompt":[' + b",".join([b"7"] * count) + b"]}"

    assert len(parse_json(ids(MAX_VALUES - 3))["prompt"]) == MAX_VALUES - 3
    with pytest.raises(InvalidRequest, match="more than 262,144 values"):
        parse_json(ids(MAX_VALUES + 1))


@pytest.mark.parametrize("call", [{"arguments": ""}, {"type": "tool_use", "input": ""}])
def test_values_in_the_arguments_of_calls_count_too(call: dict[str, str]) -> None:
    """They are JSON in a text, which is parsed: 5 million of them took 1 GB."""
    (name,) = [name for name, value in call.items() if not value]

    def calls(each: int) -> bytes:
        return json.dumps({"messages": [{"calls": [{**call, name: "{}," * each}] * 4}]}).encode()

    assert parse_json(calls(MAX_VALUES // 8))
    with pytest.raises(InvalidRequest, match="more than 262,144 values"):
        parse_json(calls(MAX_VALUES // 8 + 1))


@pytest.mark.parametrize("text", [",,," * 200_000, '\\"{[,' * 100_000, "a: b, " * 100_000, "\n," * 300_000])
def test_marks_in_a_text_are_no_values(text: str) -> None:
    assert parse_json(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":"' + b'\\",' * 1_000_000,
        b'"' * 3 + b'\\",' * 1_000_000,
        b"[]," * 1_000_000,
        b'{"a":' * 1_000_000,
        b'"a",' * 1_000_000,
        b"\\," * 1_000_000,
    ],
    ids=lambda data: repr(data[:8]),
)
def test_what_is_no_body_is_refused_in_time_that_grows_with_its_length(data: bytes) -> None:
    """The bound is on this process's CPU time: a search that begins anew at each mark would take hours."""
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        parse_json(data)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "no UTF-8: invalid start byte at byte 0"),
        (b'{"a": "\xed\xa0\x80"}', "no UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "no UTF-8"),
        ('{"a": 1}'.encode("utf-32-le"), "no JSON"),
        (b'{"a":' + b"1" * 401 + b"}", "the body has an integer of more than 400 digits"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_json(data)


def test_an_event_is_one_line_for_clients_that_split_at_any_line_break() -> None:
    body = {"arguments": '{"text": "a\u2028b\u2029c\x85d\x0be\x1cf\r\n"}', "\u2028": "漢"}
    [name, data] = server_sent_event(body, "delta").decode().split("\n\n")[0].splitlines()
    assert name == "event: delta" and json.loads(data.removeprefix("data: ")) == body


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, look: Any) -> None:
    """Have `look` called before a function of a module."""
    work = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (look(), work(*args))[1])


def test_few_threads_work_on_the_bodies_of_one_client(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred held the event loop up for seconds; sixty of 16 KB took 1.2 GB, when all became plain at once."""
    monkeypatch.setattr(server_http, "MAX_THREADS", 2)
    at_once, running = list[int](), list[int]()

    def look() -> None:
        running.append(1)
        at_once.append(len(running))
        time.sleep(0.02)
        running.pop()

    watch(monkeypatch, server_http, "decompress", look)
    watch(monkeypatch, generation.HttpRequestAnswers, "_submit_prompts", look)
    watch(monkeypatch, completions, "read", look)
    body, headers = gzip.compress(json.dumps(SMALL).encode()), {"content-encoding": "gzip"}
    with httpx.Client(base_url=serve(), trust_env=False, timeout=PATIENCE) as http, ThreadPoolExecutor(8) as pool:
        assert http.post("/v1/responses", json={"input": "a", "max_output_tokens": 16}).status_code == 200
        at_once.clear()
        asked = [pool.submit(http.post, "/v1/completions", content=body, headers=headers) for _ in range(8)]
        assert [each.result(PATIENCE).status_code for each in asked] == [200] * 8
    assert len(at_once) == 24 and max(at_once) <= 2


def test_what_may_be_long_is_not_done_on_the_event_loop(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stored 30,000 items had all of them read there for each small request that named one."""
    places = list[bool]()

    def look() -> None:
        places.append(asyncio._get_running_loop() is None)

    watch(monkeypatch, completions, "write", look)
    assert http.post("/v1/completions", json={**SMALL, "logprobs": 1}).status_code == 200
    assert places == [True]
    watch(monkeypatch, stored_responses, "_parse_items", look)
    id = http.post(
        "/v1/responses", json={"input": [{"role": "user", "content": "a"}] * 3, "max_output_tokens": 16}
    ).json()["id"]
    item = http.get(f"/v1/responses/{id}/input_items").json()["data"][0]["id"]
    before = len(places)
    http.get(f"/v1/responses/{id}")
    for more in ({"input": "b", "previous_response_id": id}, {"input": [{"type": "item_reference", "id": item}]}):
        assert http.post("/v1/responses", json={**more, "max_output_tokens": 16}).status_code == 200
    assert all(places) and len(places) >= before + 3


# Places are shared: no client, and nobody whose body crawls in, locks the others out.


SMALL: Any = {"prompt": "a", "max_tokens": 1}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nContent-Length: 500\r\n\r\n{"


async def taken(places: RequestLimiter, client: str, most: int = 1000) -> list[RequestPermit]:
    """Take places until there is none."""
    found: list[RequestPermit] = []
    while len(found) < most:
        try:
            found.append(places.acquire(client))
        except RequestRefused as refused:
            assert refused.status == 429 and refused.headers == {"retry-after": "1"}
            break
    return found


@pytest.mark.parametrize(
    ("most", "clients", "first", "second"),
    [(16, 1, 16, 0), (16, 2, 12, 4), (256, 4, 160, 32), (3, 2, 2, 1), (2, 2, 1, 1), (2, 9, 1, 1), (1, 2, 1, 0)],
)
def test_one_client_leaves_places_for_each_other(most: int, clients: int, first: int, second: int) -> None:
    async def count() -> list[int]:
        shared = RequestLimiter(most, clients)
        return [len(await taken(shared, name)) for name in "ab"]

    [mine, others] = asyncio.run(count())
    assert mine == first and others >= second and mine + others <= most


@pytest.mark.parametrize("seed", range(20))
def test_places_are_never_too_many_and_none_is_lost(seed: int) -> None:
    """Whoever has less than its own half share gets a place, whatever the others have."""

    async def play() -> None:
        draw = random.Random(seed)
        most, names = draw.randrange(1, 20), "abcdefgh"[: draw.randrange(1, 8)]
        shared, held = RequestLimiter(most, len(names)), list[RequestPermit]()
        for _ in range(300):
            if held and draw.random() < 0.4:
                place = held.pop(draw.randrange(len(held)))
                place.release()
                place.release()
            else:
                name = draw.choice(names if draw.random() < 0.5 else names[0])
                mine = sum(each.client == name for each in held)
                found = await taken(shared, name, 1)
                assert found or mine >= most // (2 * len(names)), "its own share is free"
                held += found
            assert shared.open_count == len(held) <= most
        for place in held:
            place.release()
        assert shared.open_count == 0 and len(await taken(shared, names[0])) >= max(1, most // 2)

    asyncio.run(play())


def test_twenty_bodies_that_crawl_in_lock_out_nobody(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another key, and not a request of the same key once they are slow: the oldest gives way."""
    url = httpx.URL(serve(max_open=16, keys={"one": "ann", "two": "bob"}))
    with ExitStack() as stack, httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:

        def ask(key: str) -> int:
            return http.post("/v1/completions", json=SMALL, headers={"x-api-key": key}).status_code

        crawling = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(20)]
        for line in crawling:
            line.sendall(HEAD)
        assert soon(lambda: len(answered(crawling)) == 8), "four places are kept for the other key"
        assert ask("one") == 429 and ask("two") == 200
        monkeypatch.setattr(server_http, "SLOW_BODY_SECONDS", 0.0)
        assert ask("one") == 200
        assert soon(lambda: len(answered(crawling)) == 9)
        begins = sorted(line.recv(13) for line in answered(crawling))
        assert begins == [b"HTTP/1.1 408 "] + [b"HTTP/1.1 429 "] * 8


def test_bodies_that_arrive_together_take_so_much_memory_and_no_more(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as sixteen of the greatest size, for one key half of it. Small ones always pass, and slow ones give
    way.
    """
    most = 1 << 18
    url = httpx.URL(serve(max_open=100, max_body=most, keys={"one": "ann", "two": "bob"}))
    large = json.dumps({**SMALL, "user": "u" * (most - 100)})
    head = HEAD[:-1].replace(b"500", b"%d" % most)
    with ExitStack() as stack, httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:

        def ask(key: str, body: str) -> int:
            return http.post("/v1/completions", content=body, headers={"x-api-key": key}).status_code

        crawling = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(12)]
        for line in crawling:
            line.sendall(head + b"{" * (most - 1))
        assert soon(lambda: len(answered(crawling)) == 4)
        assert all(line.recv(13) == b"HTTP/1.1 429 " for line in answered(crawling))
        assert ask("one", large) == 429 and ask("one", json.dumps(SMALL)) == 200 and ask("two", large) == 200
        monkeypatch.setattr(server_http, "SLOW_BODY_SECONDS", 0.0)
        assert ask("one", large) == 200


def answered(lines: list[socket.socket]) -> list[socket.socket]:
    return select.select(lines, [], [], 0)[0]
