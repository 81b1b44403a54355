"""Places are shared: no client, and nobody whose body crawls in, locks the others out."""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.server import http as server_http
from cortexmlx.server.http import Place, Places, RequestRefused
from support.patience import PATIENCE, soon

SMALL: Any = {"prompt": "a", "max_tokens": 1}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nContent-Length: 500\r\n\r\n{"


async def taken(places: Places, client: str, most: int = 1000) -> list[Place]:
    """Take places until there is none."""
    found: list[Place] = []
    while len(found) < most:
        try:
            found.append(places.take(client))
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
        shared = Places(most, clients)
        return [len(await taken(shared, name)) for name in "ab"]

    [mine, others] = asyncio.run(count())
    assert mine == first and others >= second and mine + others <= most


@pytest.mark.parametrize("seed", range(20))
def test_places_are_never_too_many_and_none_is_lost(seed: int) -> None:
    """Whoever has less than its own half share gets a place, whatever the others have."""

    async def play() -> None:
        draw = random.Random(seed)
        most, names = draw.randrange(1, 20), "abcdefgh"[: draw.randrange(1, 8)]
        shared, held = Places(most, len(names)), list[Place]()
        for _ in range(300):
            if held and draw.random() < 0.4:
                place = held.pop(draw.randrange(len(held)))
                place.leave()
                place.leave()
            else:
                name = draw.choice(names if draw.random() < 0.5 else names[0])
                mine = sum(each.client == name for each in held)
                found = await taken(shared, name, 1)
                assert found or mine >= most // (2 * len(names)), "its own share is free"
                held += found
            assert shared.open == len(held) <= most
        for place in held:
            place.leave()
        assert shared.open == 0 and len(await taken(shared, names[0])) >= max(1, most // 2)

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
        monkeypatch.setattr(server_http, "SLOW_SECONDS", 0.0)
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
        monkeypatch.setattr(server_http, "SLOW_SECONDS", 0.0)
        assert ask("one", large) == 200


def answered(lines: list[socket.socket]) -> list[socket.socket]:
    return select.select(lines, [], [], 0)[0]
