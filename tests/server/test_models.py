"""Several models behind one server: their names, loads on demand, and what clients are told meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from anthropic.pagination import SyncPage

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import ModelPool, ServedModel, ServerSettings, app
from cortexmlx.server.residency import FIRST_SECONDS
from cortexmlx.server.settings import LoggedRequest
from support.clients.listening import listening
from support.models.calling import write_calling
from support.patience import PATIENCE, soon

BODY: Any = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 6, "temperature": 0}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"one": write_calling(root / "one", "hermes"), "two": write_calling(root / "two", "llama")}


class Loads:
    """Loads tiny models, and counts what is open. A load waits for its gate."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = dict(folders)
        self.begun: list[str] = []
        self.most = 0
        self.gates: dict[str, threading.Event] = {}
        self._open: list[Engine] = []

    def model(self, name: str, **options: Any) -> ServedModel:
        def load(on_progress: Any) -> Engine:
            self.begun.append(name)
            if name in self.gates:
                self.gates[name].wait(PATIENCE)
            engine = Engine(str(self.folders[name]), kv_memory="8MB", max_rows=4, on_progress=on_progress)
            self._open.append(engine)
            self.most = max(self.most, sum("closed" not in repr(each) for each in self._open))
            return engine

        return ServedModel(name, load, 5, **options)


@pytest.fixture
def loads(folders: dict[str, Path]) -> Loads:
    return Loads(folders)


@pytest.fixture
def start() -> Iterator[Callable[..., httpx.Client]]:
    """Serve something; returns a client."""
    with ExitStack() as stack:

        def serve(served: Any, **options: Any) -> httpx.Client:
            url = stack.enter_context(listening(app(served, ServerSettings(**options)), grace=1.0))
            return stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False))

        yield serve


@pytest.fixture
def pool(loads: Loads) -> Iterator[ModelPool]:
    """Two models in the room of one."""
    with ModelPool([loads.model("one"), loads.model("two")], memory=8) as made:
        yield made


def told(pool: ModelPool) -> int:
    """Return how many requests have or await a model."""
    return len(pool._waits)


def test_ten_clients_alternate_between_two_models_in_the_room_of_one(
    pool: ModelPool, loads: Loads, start: Any, folders: dict[str, Path]
) -> None:
    judges = {}
    for name, folder in folders.items():
        with Engine(str(folder), kv_memory="8MB") as engine:
            judges[name] = engine.generate(BODY["messages"], SamplingParams(max_tokens=6)).text
    http = start(pool)

    def ask(number: int) -> None:
        for turn in range(3):
            name = ("one", "two")[(number + turn) % 2]
            reply = http.post(PATH, json={**BODY, "model": name}).json()
            assert (reply["model"], reply["choices"][0]["message"]["content"]) == (name, judges[name])

    with ThreadPoolExecutor(10) as clients:
        for done in [clients.submit(ask, number) for number in range(10)]:
            done.result()
    assert loads.most == 1 and told(pool) == 0


def test_a_stream_waits_for_its_model(pool: ModelPool, start: Any) -> None:
    http = start(pool)
    assert http.post(PATH, json={**BODY, "model": "one"}).status_code == 200
    with http.stream("POST", PATH, json={**BODY, "model": "two", "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and '"model":"two"' in lines[0]
    assert soon(lambda: told(pool) == 0)


def test_all_names_are_listed_and_nothing_is_loaded_for_it(pool: ModelPool, loads: Loads, start: Any) -> None:
    http = start(pool, aliases={"big": "two"}, names=("default",))
    listed = http.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["one", "two", "default", "big"]
    assert not any(each["loaded"] for each in listed) and not loads.begun
    assert http.post(PATH, json={**BODY, "model": "big"}).json()["model"] == "two"
    assert http.get("/v1/models/big").json()["loaded"] and not http.get("/v1/models/default").json()["loaded"]
    assert http.get("/v1/models/big").json()["context_length"] == 4096
    assert http.post(PATH, json=BODY).json()["model"] == "one"
    assert loads.begun == ["two", "one"]
    tokens = http.post("/tokenize", json={"content": "Hello", "model": "two"}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0 and loads.begun == ["two", "one", "two"]
    assert http.get("/").text == "cortexmlx: one\n"


def test_the_clients_of_both_apis_list_the_models(pool: ModelPool, loads: Loads, start: Any) -> None:
    http = start(pool, aliases={"big": "two"})
    names = ["one", "two", "big"]
    page = openai.types.Model
    assert [page.model_validate(each, strict=True).id for each in http.get("/v1/models").json()["data"]] == names
    listed = SyncPage[anthropic.types.ModelInfo].model_validate(http.get("/v1/models").json())
    assert [each.id for each in listed.data] == names and not listed.has_more
    assert (listed.first_id, listed.last_id) == ("one", "big")
    one = anthropic.types.ModelInfo.model_validate(http.get("/v1/models/big").json())
    assert (one.id, one.display_name, one.type) == ("big", "big", "model") and one.created_at.tzinfo is not None
    assert not loads.begun


def test_any_other_name_means_the_first_model(pool: ModelPool, start: Any) -> None:
    http = start(pool, any_name=True)
    assert http.post(PATH, json={**BODY, "model": "gpt-9"}).json()["model"] == "one"
    assert http.post(PATH, json={**BODY, "model": "two"}).json()["model"] == "two"


@pytest.mark.parametrize(
    "name",
    ["../two", "/etc/passwd", "two\0", "two/", "TWO", "", " two", "\ud800", "%2e%2e/two", "x" * 3_000_000, "tw\u200bo"],
    ids=lambda name: repr(name[:12]),
)
def test_hostile_names_are_unknown_and_load_nothing(pool: ModelPool, loads: Loads, start: Any, name: str) -> None:
    http = start(pool)
    body = json.dumps({**BODY, "model": name}).encode()
    reply = http.post(PATH, content=body)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 404 and "this server has 'one', 'two'" in message and len(message) < 500
    assert not loads.begun


def test_the_nearest_name_is_offered_and_what_is_no_name_is_refused(pool: ModelPool, start: Any) -> None:
    http = start(pool, aliases={"qwen3-coder": "two"})
    reply = http.post(PATH, json={**BODY, "model": "qwen-coder"})
    assert reply.status_code == 404 and "did you mean 'qwen3-coder'?" in reply.json()["error"]["message"]
    for name in (7, ["one"], {"one": 1}, True):
        assert http.post(PATH, json={**BODY, "model": name}).status_code == 400
    assert http.get("/v1/models/..%2Ftwo").status_code == 404
    with ThreadPoolExecutor(10) as clients:
        asked = [clients.submit(http.post, PATH, json={**BODY, "model": f"m{number}"}) for number in range(100)]
        assert {each.result().status_code for each in asked} == {404}


def test_a_wrong_body_loads_no_model(pool: ModelPool, loads: Loads, start: Any) -> None:
    http = start(pool)
    assert http.post(PATH, json={**BODY, "model": "two", "tempratur": 1}).status_code == 400
    assert http.post(PATH, json={"model": "two"}).status_code == 400
    assert not loads.begun and told(pool) == 0


def test_a_model_that_is_gone_is_503_and_comes_back(
    pool: ModelPool, loads: Loads, start: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    http = start(pool)
    loads.folders["two"] = tmp_path / "two"
    reply = http.post(PATH, json={**BODY, "model": "two"})
    assert reply.status_code == 503 and str(tmp_path) not in reply.text
    assert "the model 'two' cannot be loaded: its files are not there" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"] == "5"
    assert http.post(PATH, json={**BODY, "model": "one"}).status_code == 200
    (tmp_path / "two").symlink_to(folders["two"])
    assert http.post(PATH, json={**BODY, "model": "two"}).status_code == 503 and loads.begun == ["two", "one"]
    later = time.monotonic() + FIRST_SECONDS
    pool._clock = lambda: later
    assert http.post(PATH, json={**BODY, "model": "two"}).json()["model"] == "two"


def test_a_client_that_goes_away_while_it_waits_is_forgotten(pool: ModelPool, loads: Loads, start: Any) -> None:
    seen: list[LoggedRequest] = []
    http = start(pool, log=seen.append)
    loads.gates["two"] = threading.Event()
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=http.base_url, timeout=0.3, trust_env=False) as short:
        short.post(PATH, json={**BODY, "model": "two", "stream": True})
    assert soon(lambda: len(seen) == 1 and told(pool) == 0)
    assert seen[0].status == 499 and seen[0].model is None
    loads.gates["two"].set()
    assert http.post(PATH, json={**BODY, "model": "two"}).status_code == 200
    assert loads.begun == ["two"]
    assert soon(lambda: len(seen) == 2) and (seen[1].status, seen[1].model) == (200, "two")


def test_waiting_is_bounded_by_the_timeout_and_by_max_open(pool: ModelPool, loads: Loads, start: Any) -> None:
    http = start(pool, timeout=0.2, max_open=1)
    loads.gates["two"] = threading.Event()
    reply = http.post(PATH, json={**BODY, "model": "two"})
    assert reply.status_code == 504 and "two was not loaded within 0.2 s" in reply.json()["error"]["message"]
    assert told(pool) == 0
    other = start(pool, max_open=1)
    with ThreadPoolExecutor(1) as clients:
        waits = clients.submit(other.post, PATH, json={**BODY, "model": "two"})
        assert soon(lambda: told(pool) == 1)
        assert other.post(PATH, json={**BODY, "model": "one"}).status_code == 429
        assert other.get("/health").json() == {"status": "ok"}
        loads.gates["two"].set()
        assert waits.result().status_code == 200


def test_what_a_body_does_not_set_is_the_models_own(loads: Loads, start: Any) -> None:
    def at_most(tokens: int) -> Any:
        return lambda engine: RequestDefaults(SamplingParams(max_tokens=tokens, ignore_eos=True))

    models = [loads.model("one", defaults=at_most(3)), loads.model("two", defaults=at_most(5))]
    with ModelPool(models) as pool:
        http = start(pool)
        for name, tokens in (("one", 3), ("two", 5)):
            reply = http.post(PATH, json={"messages": BODY["messages"], "model": name}).json()
            assert reply["usage"]["completion_tokens"] == tokens


def test_engines_of_a_program_have_its_names_and_stay_open(folders: dict[str, Path], start: Any) -> None:
    with (
        Engine(str(folders["one"]), kv_memory="8MB") as first,
        Engine(str(folders["two"]), kv_memory="8MB") as second,
    ):
        http = start({"small": first, "large": second}, aliases={"gpt": "large"})
        assert [each["loaded"] for each in http.get("/v1/models").json()["data"]] == [True] * 3
        assert http.post(PATH, json={**BODY, "model": "gpt"}).json()["model"] == "large"
        assert http.post(PATH, json=BODY).json()["model"] == "small"
        assert http.post(PATH, json={**BODY, "model": "one"}).status_code == 404
        second.close()
        assert http.post(PATH, json={**BODY, "model": "large"}).status_code == 503
        assert http.post(PATH, json={**BODY, "model": "small"}).status_code == 200


def test_an_alias_of_no_model_is_refused(pool: ModelPool) -> None:
    with pytest.raises(InvalidRequest, match="'x' is to mean 'three', but there is no such model"):
        app(pool, aliases={"x": "three"})
    with pytest.raises(InvalidRequest, match="'one' is to mean 'two', but is a model's own name"):
        app(pool, aliases={"one": "two"})
