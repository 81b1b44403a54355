"""The paths for people and for Prometheus: who may see what, and how often the engine is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from cortexmlx import Engine
from cortexmlx.server import ServerSettings, app
from cortexmlx.server.settings import LoggedRequest
from support.patience import PATIENCE, soon

HTML = {"Accept": "text/html,*/*;q=0.8"}
BODY: Any = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    reply = http.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(reply.text)
    samples = (sample for family in families for sample in family.samples if sample.name == f"cortexmlx_{name}")
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_requests_show_in_the_metrics(http: httpx.Client) -> None:
    before = metric(http, "generated_tokens_total", model="tiny")
    assert http.post(CHAT, json=BODY).status_code == 200
    assert "[DONE]" in http.post(CHAT, json={**BODY, "stream": True}).text
    assert http.post(CHAT, json={**BODY, "n": 2}).status_code == 200
    assert http.post(CHAT, content=b"{").status_code == 400
    assert http.get("/made/up/by/a/client").status_code == 404
    assert soon(lambda: metric(http, "requests_total", model="tiny") == 4)
    assert soon(lambda: metric(http, "generated_tokens_total", model="tiny") - before >= 4)
    assert metric(http, "http_requests_total", path=CHAT, status="200") == 3
    assert metric(http, "http_requests_total", path=CHAT, status="400") == 1
    assert metric(http, "http_requests_total", path="other", status="404") == 1
    assert metric(http, "request_seconds_count", model="tiny") == 4 == metric(http, "queue_seconds_count")
    assert "made" not in http.get("/metrics").text


def test_a_client_that_goes_away_is_a_cancelled_answer(serve: Any) -> None:
    long: Any = {**BODY, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=serve(), timeout=PATIENCE, trust_env=False) as http:
        with http.stream("POST", CHAT, json=long) as reply:
            next(reply.iter_lines())
        assert soon(lambda: metric(http, "requests_total", finish_reason="cancelled") == 1)
        assert soon(lambda: metric(http, "http_requests_total", path=CHAT, status="499") == 1)


def test_one_timed_out_answer_is_an_error(ask: Any) -> None:
    with ask(timeout=0.001) as http:
        assert http.post(CHAT, json={**BODY, "max_tokens": 3000, "ignore_eos": True}).status_code == 504
        assert soon(lambda: metric(http, "requests_total", finish_reason="error") == 1)


def test_browsers_get_the_page_and_others_a_line(http: httpx.Client) -> None:
    assert http.get("/", headers=HTML).headers["content-type"].startswith("text/html")
    for accept in ("*/*", "text/plain", "application/json", ""):
        reply = http.get("/", headers={"Accept": accept})
        assert reply.text == "cortexmlx: tiny\n" and reply.headers["content-type"].startswith("text/plain")
    assert http.head("/").status_code == http.head("/metrics").status_code == 200
    assert http.post("/").status_code == http.post("/live").status_code == 405


@pytest.mark.parametrize(("keys", "whole"), [({}, True), ({"k": "a"}, True), ({"k": "a", "l": "b"}, False)])
def test_only_one_client_sees_blocks_and_requests(ask: Any, keys: dict[str, str], whole: bool) -> None:
    with ask(keys=keys) as http:
        found = http.get("/live", headers={"x-api-key": "k"} if keys else {}).json()
    assert found["whole"] == whole and (found["models"][0]["blocks"] is not None) == whole


def test_the_state_is_compressed_for_who_takes_it(http: httpx.Client) -> None:
    plain = http.get("/live", headers={"Accept-Encoding": "identity"})
    packed = http.get("/live", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert packed.json()["models"][0]["name"] == plain.json()["models"][0]["name"] == "tiny"
    assert plain.headers["cache-control"] == "no-store"


class Counted:
    """An engine whose statistics wait until `go`, and are counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.go = threading.Event()
        self.asked = 0
        self.running = self.most = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def stats(self) -> Any:
        with self._lock:
            self.asked += 1
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.go.wait(PATIENCE)
        with self._lock:
            self.running -= 1
        return self._engine.stats()


def asynchronously(application: Any, work: Callable[[httpx.AsyncClient], Any]) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as http:
            await work(http)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/live", "/metrics"])
def test_two_hundred_viewers_ask_the_engine_once_and_hold_nobody_up(engine: Engine, path: str) -> None:
    counted: Any = Counted(engine)

    async def watch(http: httpx.AsyncClient) -> None:
        asked = [asyncio.create_task(http.get(path)) for _ in range(200)]
        while not counted.asked:
            await asyncio.sleep(0)
        assert (await http.get("/health")).status_code == 200, "the loop goes on while the engine is asked"
        counted.go.set()
        replies = await asyncio.gather(*asked)
        assert {reply.status_code for reply in replies} == {200} and len({reply.content for reply in replies}) == 1
        assert (counted.asked, counted.most) == (1, 1)

    asynchronously(app(counted), watch)


def test_an_engine_that_is_closed_meanwhile_is_told(folder: Path) -> None:
    with Engine(str(folder), kv_memory="8MB") as own:
        application = app(own)

        async def watch(http: httpx.AsyncClient) -> None:
            assert (await http.get("/live")).json()["models"][0]["open"]
            own.close()
            reply = await http.get("/live")
            while reply.json()["models"][0]["open"]:
                await asyncio.sleep(0.01)
                reply = await http.get("/live")
            assert reply.status_code == 200
            metrics = await http.get("/metrics")
            assert metrics.status_code == 200 and 'cortexmlx_up{model="tiny"} 0.0' in metrics.text
            assert (await http.get("/", headers=HTML)).status_code == 200

        asynchronously(application, watch)


def test_the_pages_asking_is_counted_and_not_logged(ask: Any) -> None:
    seen: list[LoggedRequest] = []
    with ask(log=seen.append, keys={"k": "a"}) as http:
        assert http.get("/live").status_code == 401
        http.headers["x-api-key"] = "k"
        assert http.get("/live").status_code == http.get("/health").status_code == 200
        assert soon(lambda: metric(http, "http_requests_total", path="/live", status="200") == 1)
    assert [(each.path, each.status) for each in seen[:2]] == [("/live", 401), ("/health", 200)]


def test_mounted_in_another_application_paths_are_the_servers_own(engine: Engine) -> None:
    seen: list[LoggedRequest] = []
    whole = Starlette(routes=[Mount("/ai", app(engine, ServerSettings(keys={"k": "a"}, log=seen.append)))])

    async def watch(http: httpx.AsyncClient) -> None:
        assert (await http.get("/ai/", headers=HTML)).headers["content-type"].startswith("text/html")
        assert (await http.get("/ai/live")).status_code == 401
        assert (await http.get("/ai/live", headers={"x-api-key": "k"})).status_code == 200
        text = (await http.get("/ai/metrics", headers={"x-api-key": "k"})).text
        assert 'cortexmlx_http_requests_total{path="/live",status="200"} 1.0' in text
        assert 'cortexmlx_http_requests_total{path="/",status="200"} 1.0' in text

    asynchronously(whole, watch)
    assert [each.path for each in seen] == ["/ai/", "/ai/live", "/ai/metrics"]
