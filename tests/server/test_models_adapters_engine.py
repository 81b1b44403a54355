"""`base:sql` over HTTP is the engine with that adapter, whatever else is asked at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.server import ServerSettings, app
from support.clients.listening import listening
from support.models.adapters import write_adapter
from support.patience import PATIENCE

USER: Any = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    root = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: write_adapter(root / name, folder, scale=scale) for name, scale in (("sql", 20.0), ("poems", 60.0))
    }
    with (
        Engine(str(folder), kv_memory="16MB", max_rows=4, adapters=adapters) as engine,
        listening(app(engine, ServerSettings())) as url,
    ):
        yield url, engine


def test_each_adapter_answers_as_the_engine_does_with_it(served: tuple[str, Engine]) -> None:
    url, engine = served
    names = [None, "sql", "poems"] * 4
    judges = {name: engine.generate(USER, SamplingParams(max_tokens=12), adapter=name).text for name in set(names)}
    assert len(set(judges.values())) == 3, "they differ, so that a test can tell them apart"
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http, ThreadPoolExecutor(6) as pool:

        def ask(name: str | None) -> str:
            model = "tiny" if name is None else f"tiny:{name}"
            body = {"model": model, "messages": USER, "max_tokens": 12, "temperature": 0}
            answer: str = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            return answer

        assert [*pool.map(ask, names)] == [judges[name] for name in names]


def test_adapters_that_come_and_go_are_listed_as_they_are(served: tuple[str, Engine]) -> None:
    url, engine = served
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:

        def names() -> list[str]:
            return [each["id"] for each in http.get("/v1/models").json()["data"]]

        engine.load_adapter("other", engine.adapters["sql"].path)
        assert "tiny:other" in names()
        engine.unload_adapter("other")
        assert names() == ["tiny", "tiny:sql", "tiny:poems"]
        body = {"model": "tiny:other", "messages": USER, "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 404
