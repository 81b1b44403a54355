"""The server's vectors and scores are the engine's, through the OpenAI package and on disk folders of real shapes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from cortexmlx import Engine
from cortexmlx.server import ServerSettings, app
from support.clients.listening import listening
from support.embedding.models import write_embedding, write_reranker
from support.engine.core_driver import finally_nothing_lost
from support.models.tiny import write_tiny
from support.patience import PATIENCE

TEXTS = ["one", "two words", "a longer text " * 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_embedding(root / "embedder"), write_reranker(root / "Qwen3-Reranker-tiny")


@pytest.fixture(scope="module")
def url(folders: tuple[Path, Path]) -> Iterator[tuple[str, dict[str, Engine]]]:
    named = zip(("embedder", "reranker"), folders, strict=True)
    made = {name: Engine(str(folder), kv_memory="8MB", max_rows=4) for name, folder in named}
    try:
        with listening(app(made, ServerSettings())) as address:
            yield address, made
        for engine in made.values():
            finally_nothing_lost(engine)
    finally:
        for engine in made.values():
            engine.close()


@pytest.fixture(scope="module")
def client(url: Any) -> Iterator[openai.OpenAI]:
    web = openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    with openai.OpenAI(base_url=f"{url[0]}/v1", api_key="none", max_retries=0, http_client=web) as made:
        yield made


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(np.array(one, np.float32), other, atol=1e-5))


@pytest.mark.parametrize("how", [{}, {"prompt_name": "query"}, {"dimensions": 8}])
@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_are_the_engines(client: openai.OpenAI, url: Any, how: dict[str, Any], form: Any) -> None:
    engine = url[1]["embedder"]
    own = {"prompt" if name == "prompt_name" else name: value for name, value in how.items()}
    judge = engine.embed(TEXTS, **own)
    made = client.embeddings.create(model="embedder", input=TEXTS, encoding_format=form, extra_body=how)
    found: list[Any] = [item.embedding for item in made.data]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
    assert close(found, judge.vectors) and made.usage.prompt_tokens == sum(judge.prompt_tokens)


def test_token_ids_make_the_vectors_of_their_texts(client: openai.OpenAI, url: Any) -> None:
    engine = url[1]["embedder"]
    ids = [engine.encode(text) for text in TEXTS]
    made = client.embeddings.create(model="embedder", input=ids)
    assert close([item.embedding for item in made.data], engine.embed(ids).vectors)
    with pytest.raises(openai.BadRequestError) as told:
        client.embeddings.create(model="embedder", input=[[engine.info.vocab_size]])
    assert told.value.param == "input[0]"


def test_documents_are_ordered_by_the_engines_scores(url: Any) -> None:
    address, engines = url
    judge = engines["reranker"].rerank("which?", TEXTS)
    with httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE) as http:
        body = http.post("/v1/rerank", json={"model": "reranker", "query": "which?", "documents": TEXTS}).json()
        other = http.post("/v1/rerank", json={"model": "embedder", "query": "which?", "documents": TEXTS})
    found = {result["index"]: result["relevance_score"] for result in body["results"]}
    assert close([found[place] for place in range(3)], judge.scores)
    assert [*found] == sorted(found, key=lambda place: -found[place])
    assert other.status_code == 400 and other.json()["error"]["type"] == "invalid_request_error"


def test_a_model_that_cannot_is_named_and_not_its_folder(client: openai.OpenAI, folders: tuple[Path, Path]) -> None:
    with pytest.raises(openai.BadRequestError, match="reranker") as told:
        client.embeddings.create(model="reranker", input="a")
    assert str(folders[1].parent) not in str(told.value)


def test_the_folder_of_a_model_with_another_name_is_not_told_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "chat", "llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        Engine("~/chat", kv_memory="1MB") as engine,
        listening(app({"chat": engine}, ServerSettings())) as address,
        httpx.Client(base_url=address) as http,
    ):
        assert engine.info.name != engine.info.path == str(tmp_path / "chat")
        for path, asked in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["a"]})):
            reply = http.post(path, json=asked)
            assert reply.status_code == 400 and "chat cannot" in reply.text and str(tmp_path) not in reply.text


def test_many_at_once_get_their_own(client: openai.OpenAI, url: Any) -> None:
    judge = url[1]["embedder"].embed([f"text {number}" for number in range(24)]).vectors
    with ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> list[float]:
            return client.embeddings.create(model="embedder", input=f"text {number}").data[0].embedding

        assert close([*pool.map(ask, range(24))], judge)
