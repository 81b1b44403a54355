"""The paths for people and for Prometheus: who may see what, and how often the engine is asked."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import tomllib
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

import cortexmlx.server
from cortexmlx import Engine
from cortexmlx.errors import EngineClosed
from cortexmlx.server import ServerSettings, app
from cortexmlx.server.monitoring import MAX_LISTED_REQUESTS, LiveState, SharedResult, live_state, page_response
from cortexmlx.server.settings import LoggedRequest
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks
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
    seen: list[LoggedRequest] = []
    with httpx.Client(base_url=serve(log=seen.append), timeout=PATIENCE, trust_env=False) as http:
        with http.stream("POST", CHAT, json=long) as reply:
            next(reply.iter_lines())
        assert soon(lambda: metric(http, "requests_total", finish_reason="cancelled") == 1)
        assert soon(lambda: metric(http, "http_requests_total", path=CHAT, status="499") == 1)
    assert (seen[0].path, seen[0].status) == (CHAT, 499)


def test_one_timed_out_answer_is_an_error(ask: Any) -> None:
    with ask(timeout=0.5) as http:
        reply = http.post(CHAT, json={**BODY, "max_tokens": 3000, "ignore_eos": True})
        assert reply.status_code == 504 and "not finished after 0.5 s:" in reply.text, "not 0.499872 s"
        assert soon(lambda: metric(http, "requests_total", finish_reason="error") == 1)


def test_browsers_get_the_page_and_others_a_line(http: httpx.Client) -> None:
    assert http.get("/", headers=HTML).headers["content-type"].startswith("text/html")
    for accept in ("*/*", "text/plain", "application/json", ""):
        reply = http.get("/", headers={"Accept": accept})
        assert reply.text == "cortexmlx: tiny\n" and reply.headers["content-type"].startswith("text/plain")
    assert http.head("/").status_code == http.head("/metrics").status_code == 200
    refused = [http.post("/"), http.post("/live")]
    assert [(each.status_code, each.headers["allow"]) for each in refused] == [(405, "GET, HEAD")] * 2
    assert "/live takes GET, HEAD, not POST" in refused[1].text


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
        reply = await http.post(f"/ai{CHAT}", json=BODY, headers={"x-api-key": "k"})
        assert reply.status_code == 200 and reply.json()["choices"]
        text = (await http.get("/ai/metrics", headers={"x-api-key": "k"})).text
        assert 'cortexmlx_http_requests_total{path="/live",status="200"} 1.0' in text
        assert 'cortexmlx_http_requests_total{path="/",status="200"} 1.0' in text

    asynchronously(whole, watch)
    assert [each.path for each in seen] == ["/ai/", "/ai/live", f"/ai{CHAT}", "/ai/metrics"]


# What the page gets: totals for all, the map of blocks and the open requests for one client, and no texts.


SECRET = "A secret question that nobody else may read"


def body(found: LiveState) -> Any:
    assert gzip.decompress(found.gzip_data) == found.json_data
    return json.loads(found.json_data)


class Looks:
    """An engine with another map of blocks."""

    def __init__(self, engine: Engine, states: bytes) -> None:
        self.info, self.longest_request, self.stats = engine.info, engine.longest_request, engine.stats
        self._states = states

    def blocks(self) -> BlockMap:
        return BlockMap(16, (GroupBlocks(2, None, 1024, len(self._states), self._states),))


def test_it_has_the_engines_numbers_and_blocks(engine: Engine) -> None:
    engine.generate(SECRET, max_tokens=9)
    found = body(live_state([("tiny", engine)], include_details=True))
    [model], stats, blocks = found["models"], engine.stats(), engine.blocks()
    assert model["name"] == "tiny" and model["open"] and model["longest"] == engine.longest_request
    assert model["generated_tokens"] == stats.generated_tokens and model["rows"] == stats.max_rows
    states = [bytes(map(int, group["states"])) for group in model["blocks"]["groups"]]
    assert states == [group.states for group in blocks.groups] and model["blocks"]["tokens"] == blocks.block_size
    assert found["states"] == [state.name.lower() for state in BlockState] and model["requests"] == []


def test_open_requests_are_numbers_without_texts_and_clients(engine: Engine) -> None:
    handle = engine.submit(SECRET, max_tokens=3000, ignore_eos=True, client="somebody")
    next(iter(handle))
    found = live_state([("tiny", engine)], include_details=True)
    [[state, prompt, cached, computed, answer, most]] = body(found)["models"][0]["requests"]
    assert state == "decoding" and prompt == engine.count_tokens(SECRET) and most == 3000
    assert cached <= prompt <= computed and 1 <= answer < most
    assert b"secret" not in found.json_data and b"somebody" not in found.json_data
    many = [engine.submit("x", max_tokens=3000, ignore_eos=True) for _ in range(MAX_LISTED_REQUESTS + 9)]
    assert (
        len(body(live_state([("tiny", engine)], include_details=True))["models"][0]["requests"]) == MAX_LISTED_REQUESTS
    )
    for each in (handle, *many):
        each.cancel()
        each.result()


def test_a_hundred_thousand_blocks_are_compact(engine: Engine) -> None:
    states = bytes(BlockState(each % 5) for each in range(100_000))
    looks: Any = Looks(engine, states)
    found = live_state([("tiny", looks)], include_details=True)
    assert bytes(map(int, body(found)["models"][0]["blocks"]["groups"][0]["states"])) == states
    assert len(found.json_data) < 110_000 and len(found.gzip_data) < 5_000


def test_any_name_is_json(engine: Engine) -> None:
    for name in ('</script><img onerror="x">', "a\nb", "half \udc80", ""):
        assert body(live_state([(name, engine)], include_details=True))["models"][0]["name"] == name


# However many ask, one call runs at a time, and errors are shared, too.


def test_all_who_ask_at_once_get_one_result() -> None:
    calls: list[int] = []
    go = threading.Event()

    def make() -> int:
        calls.append(len(calls))
        assert go.wait(PATIENCE)
        return calls[-1]

    async def ask() -> None:
        shared = SharedResult(make, interval=3600.0)
        asked = [asyncio.create_task(shared.get()) for _ in range(200)]
        await asyncio.sleep(0)
        asked[0].cancel()
        asked[7].cancel()
        go.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert results.count(0) == 198 and calls == [0]
        assert await shared.get() == 0, "the next call is not due"

    asyncio.run(ask())


def test_an_error_is_shared_and_kept_as_long_as_a_result() -> None:
    calls = 0

    def make() -> None:
        nonlocal calls
        calls += 1
        raise EngineClosed("closed")

    async def ask(shared: SharedResult[None], times: int) -> None:
        errors = await asyncio.gather(*(shared.get() for _ in range(times)), return_exceptions=True)
        assert len(errors) == times and all(isinstance(error, EngineClosed) for error in errors)
        with pytest.raises(EngineClosed):
            await shared.get()

    asyncio.run(ask(SharedResult(make, interval=3600.0), 20))
    assert calls == 1


def test_callers_who_have_all_gone_leave_no_complaint() -> None:
    said: list[object] = []
    go = threading.Event()

    def make() -> None:
        assert go.wait(PATIENCE)
        raise EngineClosed("closed")

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        shared = SharedResult(make, interval=0.0)
        asked = asyncio.create_task(shared.get())
        await asyncio.sleep(0)
        asked.cancel()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], asyncio.CancelledError)
        go.set()
        with pytest.raises(EngineClosed):
            await shared.get()
        del shared

    asyncio.run(ask())
    assert said == []


# The page is one file that runs and loads nothing else, and a wheel has it.


ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "cortexmlx/server/index.html"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Inline(HTMLParser):
    """Collects the texts of scripts and styles, all tags, and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.attributes: list[tuple[str, str, str]] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


@pytest.fixture
def inline() -> Inline:
    parser = Inline()
    parser.feed(FILE.read_text(encoding="utf-8"))
    return parser


def policy() -> dict[str, str]:
    rules = (rule.partition(" ") for rule in page_response().headers["content-security-policy"].split("; "))
    return {name: value for name, _, value in rules}


@pytest.mark.parametrize("tag", ["script", "style"])
def test_only_the_files_own_scripts_and_styles_run(inline: Inline, tag: str) -> None:
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in inline.texts[tag]]
    assert len(hashes) == 1 and policy()[f"{tag}-src"] == " ".join(f"'sha256-{each}'" for each in hashes)


def test_nothing_else_is_loaded_and_nobody_may_frame_it() -> None:
    rules = policy()
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert not any("unsafe" in value or "http" in value or "*" in value for value in rules.values())
    headers = page_response().headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer" and headers["content-type"] == "text/html; charset=utf-8"


def test_the_file_has_no_address_handler_or_style_that_the_policy_would_refuse(inline: Inline) -> None:
    refused = [
        (tag, name, value)
        for tag, name, value in inline.attributes
        if name.startswith("on") or name == "style" or (name in ("src", "href") and not value.startswith("data:"))
    ]
    assert refused == []
    [script], [style] = inline.texts["script"], inline.texts["style"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)
    assert "localStorage" not in script and "cookie" not in script and "url(" not in style and "@import" not in style
    assert "://" not in script + style


def test_what_a_person_uses_has_a_name(inline: Inline) -> None:
    labelled = {value for tag, name, value in inline.attributes if (tag, name) == ("label", "for")}
    assert {"key", "prompt"} <= labelled
    assert ("html", "lang", "en") in inline.attributes and ("meta", "name", "viewport") in inline.attributes
    text = FILE.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "prefers-reduced-motion" in text


def test_a_wheel_has_the_file() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = Path(cortexmlx.server.__path__[0])
    found = {path.name for pattern in data["cortexmlx.server"] for path in folder.glob(pattern)}
    assert found == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"} == {FILE.name}


def test_it_is_the_file(http: httpx.Client) -> None:
    reply = http.get("/", headers=BROWSER)
    assert reply.content == FILE.read_bytes() and reply.status_code == 200
    head = http.head("/", headers=BROWSER)
    assert head.content == b"" and head.headers["content-security-policy"] == reply.headers["content-security-policy"]
