"""`/v1/embeddings` and `/v1/rerank` over HTTP, with made up numbers: the OpenAI package reads them, what is wrong is
refused by its field, and who goes away is not computed for.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from cortexmlx import EmbeddingRefused, Engine
from cortexmlx.server.settings import LoggedRequest, RequestTokens
from support.fakes.numbers import INFO, MadeUpNumbers, score_of, vector_of
from support.patience import PATIENCE, soon

Serve = Callable[..., str]


@pytest.fixture
def numbers(engine: Engine) -> Iterator[MadeUpNumbers]:
    made = MadeUpNumbers(engine)
    yield made
    made.held.set()


@pytest.fixture
def served(numbers: MadeUpNumbers) -> Any:
    return numbers


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_the_openai_package_reads_the_vectors(client: openai.OpenAI, form: Any) -> None:
    more: Any = {} if form is None else {"encoding_format": form}
    made = client.embeddings.create(model="tiny", input=["one", "two"], dimensions=8, **more)
    for index, text in enumerate(("one", "two")):
        found: Any = made.data[index].embedding
        if form == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4")
        assert np.allclose(np.array(found, np.float32), vector_of(text, dimensions=8), atol=0)
    assert made.model == "tiny" and made.usage.prompt_tokens == made.usage.total_tokens == 6
    [tokens] = client.embeddings.create(model="tiny", input=[1, 2, 3]).data
    assert np.array_equal(np.array(tokens.embedding, np.float32), vector_of([1, 2, 3]))
    [query] = client.embeddings.create(model="tiny", input="one", extra_body={"prompt_name": "query"}).data
    assert np.array_equal(np.array(query.embedding, np.float32), vector_of("one", "query"))


def test_a_large_reply_is_the_same_as_its_parts(client: openai.OpenAI) -> None:
    texts = [f"text {number}" for number in range(2048)]
    made = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [item.index for item in made.data] == list(range(2048))
    assert np.array_equal(
        np.array([item.embedding for item in made.data], np.float32), np.stack([*map(vector_of, texts)])
    )


def test_what_is_cut_off_is_told(http: httpx.Client) -> None:
    long = "x" * (INFO.max_tokens + 1)
    refused = http.post("/v1/embeddings", json={"input": long})
    assert refused.status_code == 400 and "65 tokens" in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "invalid_request_error"
    for how in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        body = http.post("/v1/embeddings", json={"input": [long, "short"], **how}).json()
        assert [item.get("truncated") for item in body["data"]] == [True, None]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_back_by_their_scores(http: httpx.Client, path: str) -> None:
    documents = [f"document {number}" for number in range(9)]
    sent = {"model": "tiny", "query": "which?", "documents": [*documents[:-1], {"text": documents[-1]}], "top_n": 4}
    body = http.post(path, json=sent).json()
    best = sorted(range(9), key=lambda place: -score_of("which?", documents[place]))[:4]
    assert [result["index"] for result in body["results"]] == best
    assert all(result["document"] == {"text": documents[result["index"]]} for result in body["results"])
    assert body["model"] == "tiny" and body["usage"]["prompt_tokens"] == sum(map(len, documents))


def test_large_documents_come_back_as_they_were(http: httpx.Client) -> None:
    """Such a reply is written on a thread."""
    documents = [f"{number} " + "\u00e9\U0001f600" * 300 for number in range(300)]
    body = http.post("/v1/rerank", json={"model": "tiny", "query": "which?", "documents": documents}).json()
    assert sorted(result["index"] for result in body["results"]) == list(range(300))
    assert all(result["document"] == {"text": documents[result["index"]]} for result in body["results"])


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "says"),
    [
        ("/v1/embeddings", b"{}", 400, "input", "is missing"),
        ("/v1/embeddings", b'{"input": []}', 400, "input", "no texts"),
        ("/v1/embeddings", b'{"input": "a", "dimensions": NaN}', 400, "dimensions", "nan"),
        ("/v1/embeddings", b'{"input": "a", "dimensions": 17}', 400, "dimensions", "16"),
        ("/v1/embeddings", b'{"input": [5, 99999999]}', 400, "input", "token id 99999999"),
        ("/v1/embeddings", b'{"input": ["a", "\\ud800"]}', 400, "input[1]", "surrogate"),
        ("/v1/embeddings", b'{"input": "a", "prompt_name": "quer"}', 400, "prompt_name", "did you mean 'query'"),
        ("/v1/embeddings", b'{"input": [' + b'"a",' * 99_999 + b'"a"]}', 400, "input", "100,000 texts"),
        ("/v1/embeddings", b'{"input": "a", "model": "other"}', 404, None, "there is no model 'other'"),
        ("/v1/embeddings", b'{"input": "a", "model": 7}', 400, "model", "model is 7"),
        ("/v1/embeddings", b"[]", 400, None, "must be a JSON object"),
        ("/v1/rerank", b"{}", 400, "query", "is missing"),
        ("/v1/rerank", b'{"query": "a", "documents": []}', 400, "documents", "is empty"),
        ("/v1/rerank", b'{"query": "a", "documents": ["a", {"txt": 1}]}', 400, "documents[1].txt", "'text'"),
        ("/rerank", b'{"query": "a", "documents": ["a"], "top_n": "1"}', 400, "top_n", "top_n is '1'"),
    ],
)
def test_what_is_wrong_is_said(
    http: httpx.Client, path: str, body: bytes, status: int, field: str | None, says: str
) -> None:
    reply = http.post(path, content=body)
    error = reply.json()["error"]
    assert reply.status_code == status and says in error["message"], reply.text
    assert error["param"] == field and len(reply.text) < 1000


def test_a_model_that_makes_no_embeddings_says_so(
    engine: Engine, numbers: MadeUpNumbers, client: openai.OpenAI
) -> None:
    async def refuse(*texts: Any, **options: Any) -> Any:
        raise EmbeddingRefused("tiny is no embedding model")

    numbers.aembed = refuse  # type: ignore[method-assign]
    with pytest.raises(openai.BadRequestError, match="no embedding model"):
        client.embeddings.create(model="tiny", input="a")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", b'{"input": "a"}'), ("/v1/rerank", b'{"query": "a", "documents": ["b"]}')],
)
def test_a_client_that_goes_away_cancels_its_request(
    serve: Serve, numbers: MadeUpNumbers, path: str, body: bytes
) -> None:
    """While it is computed, there may be no other, if there may be one."""
    logged: list[LoggedRequest] = []
    url = serve(log=logged.append, max_open=1)
    numbers.held.clear()
    address = httpx.URL(url)
    assert address.port is not None
    with socket.create_connection((address.host, address.port)) as line:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        assert numbers.waiting.wait(PATIENCE)
        assert httpx.post(url + path, content=body, trust_env=False).status_code == 429
    assert numbers.cancelled.wait(PATIENCE)
    numbers.held.set()
    with httpx.Client(base_url=url, trust_env=False) as http:
        assert soon(lambda: http.post(path, content=body).status_code == 200)
    assert {one.status for one in logged} <= {499, 429, 200}


def test_time_keys_and_crowds_have_limits(serve: Serve, numbers: MadeUpNumbers) -> None:
    logged: list[LoggedRequest] = []
    url = serve(keys={"k1": "ann", "k2": "bob"}, timeout=0.2, max_open=1, max_body=1000, log=logged.append)
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:

        def ask(key: str, text: str = "a") -> int:
            header = {"authorization": f"Bearer {key}"}
            return http.post("/v1/embeddings", json={"input": text}, headers=header).status_code

        assert [ask("k1"), ask("k2"), ask("k3")] == [200, 200, 401]
        assert numbers.clients == ["ann", "bob"]
        assert ask("k1", "a" * 1000) == 413
        numbers.held.clear()
        assert ask("k1") == 504 and numbers.cancelled.is_set()
    assert [one.tokens for one in logged[:3]] == [RequestTokens(1, 0, 0), RequestTokens(1, 0, 0), None]
    assert logged[0].model == "tiny"
