"""Each request is logged once, with its tokens, and without its texts and keys."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx

from cortexmlx.server.settings import LoggedRequest
from support.patience import PATIENCE, soon

BODY: Any = {"messages": [{"role": "user", "content": "A secret question, quite long " * 9}], "max_tokens": 5}


def test_requests_are_logged(ask: Any) -> None:
    seen: list[LoggedRequest] = []
    with ask(log=seen.append, keys={"sekret": "a"}) as http:
        http.headers["x-api-key"] = "sekret"
        http.post("/v1/chat/completions", json={**BODY, "seed": 1})
        http.post("/v1/chat/completions", json={**BODY, "stream": True})
        http.post("/v1/completions", content=b"{")
        http.get("/v1/models", headers={"x-api-key": "wrong"})
    assert soon(lambda: len(seen) == 4)
    assert [(each.method, each.status) for each in seen] == [("POST", 200), ("POST", 200), ("POST", 400), ("GET", 401)]
    first, second = seen[0].tokens, seen[1].tokens
    assert first is not None and second is not None and first.cached == 0 < second.cached
    assert first.prompt == second.prompt and 0 < first.answer <= 5
    assert seen[2].tokens is None and "sekret" not in repr(seen) and "secret" not in repr(seen)


def test_a_client_that_goes_away_is_told_apart(serve: Any) -> None:
    seen: list[LoggedRequest] = []
    with httpx.Client(base_url=serve(log=seen.append), timeout=PATIENCE, trust_env=False) as http:
        long: Any = {**BODY, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=long) as reply:
            next(reply.iter_lines())
    assert soon(lambda: len(seen) == 1)
    assert seen[0].status == 499
