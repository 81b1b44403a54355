"""Adapters are models of their own to clients: `base:sql` in the list of models, and in each request."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from cortexmlx import Engine
from cortexmlx.server import ModelPool, ServedModel, ServerSettings, app
from support.clients.in_process import InProcess
from support.clients.listening import listening
from support.patience import PATIENCE


class Adapted:
    """An engine with adapters of these names."""

    def __init__(self, engine: Any, *names: str) -> None:
        self._engine = engine
        self.adapters: Any = MappingProxyType(dict.fromkeys(names))
        self.asked: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, *prompt: Any, adapter: str | None = None, **options: Any) -> Any:
        """As the engine's."""
        self.asked.append(adapter)
        return self._engine.submit(*prompt, **options)


USER: Any = [{"role": "user", "content": "Hello?"}]
Serve = Callable[..., str]


@pytest.fixture
def adapted(engine: Engine) -> Adapted:
    return Adapted(engine, "sql", "poems")


@pytest.fixture
def served(adapted: Adapted) -> Any:
    return adapted


def asked(http: httpx.Client, model: str | None) -> Any:
    named = {} if model is None else {"model": model}
    return http.post("/v1/chat/completions", json={**named, "messages": USER, "max_tokens": 2})


def test_adapters_are_listed_below_their_model(http: httpx.Client) -> None:
    data = http.get("/v1/models").json()["data"]
    assert {each["id"]: each.get("parent") for each in data} == {"tiny:sql": "tiny", "tiny:poems": "tiny", "tiny": None}
    assert data[0]["id"] == "tiny"
    one = http.get("/v1/models/tiny:sql").json()
    assert one["parent"] == "tiny" and one["context_length"] == 4096 and one["loaded"] is True


def test_every_protocol_asks_the_adapter_that_is_named(
    client: openai.OpenAI, http: httpx.Client, adapted: Adapted
) -> None:
    chat = client.chat.completions.create(model="tiny:sql", messages=USER, max_tokens=2)
    assert chat.model == "tiny:sql"
    [*chunks] = client.chat.completions.create(model="tiny:poems", messages=USER, max_tokens=2, stream=True)
    assert {chunk.model for chunk in chunks} == {"tiny:poems"}
    assert client.completions.create(model="tiny:sql", prompt=["a", "b"], max_tokens=2).model == "tiny:sql"
    assert client.responses.create(model="tiny:poems", input="a", max_output_tokens=2).model == "tiny:poems"
    made: Any = adapted
    web = anthropic.DefaultHttpxClient(transport=InProcess(app(made)))
    with anthropic.Anthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=web) as other:
        assert other.messages.create(model="tiny:sql", messages=USER, max_tokens=2).model == "tiny:sql"
    assert adapted.asked == ["sql", "poems", "sql", "sql", "poems", "sql"]
    adapted.asked.clear()
    assert asked(http, "tiny").json()["model"] == asked(http, None).json()["model"] == "tiny"
    assert adapted.asked == [None, None]


def test_other_names_of_the_model_and_the_adapters_own_name_mean_it_too(serve: Serve, adapted: Adapted) -> None:
    with httpx.Client(base_url=serve(names=("small",), any_name=True), trust_env=False, timeout=PATIENCE) as http:
        assert asked(http, "small:sql").json()["model"] == asked(http, "sql").json()["model"] == "tiny:sql"
        assert asked(http, "gpt-9").json()["model"] == asked(http, "gpt-9:x").json()["model"] == "tiny"
        assert adapted.asked == ["sql", "sql", None, None]
        assert "small:sql" not in [each["id"] for each in http.get("/v1/models").json()["data"]]


@pytest.mark.parametrize("name", ["tiny:sqll", "tiny:", "tiny:sql:sql", "other:sql", "sqll", ":sql"])
def test_an_unknown_adapter_is_a_model_that_is_not_there(http: httpx.Client, name: str) -> None:
    reply = asked(http, name)
    error = reply.json()["error"]
    assert reply.status_code == 404 and error["code"] == "model_not_found"
    assert repr(name) in error["message"] and "this server has 'tiny', 'tiny:sql', 'tiny:poems'" in error["message"]


def test_any_name_does_not_hide_a_mistyped_adapter(serve: Serve, adapted: Adapted) -> None:
    with httpx.Client(base_url=serve(any_name=True), trust_env=False, timeout=PATIENCE) as http:
        for name in ("tiny:sqll", "tiny:sql:sql"):
            assert asked(http, name).status_code == 404 and adapted.asked == []


@pytest.mark.parametrize("options", [{}, {"any_name": True}])
def test_an_adapters_name_may_have_a_colon(engine: Engine, options: dict[str, bool]) -> None:
    made: Any = Adapted(engine, "team:sql")
    with (
        listening(app(made, ServerSettings(names=("small",), **options))) as url,  # type: ignore[arg-type]
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        for name in ("tiny:team:sql", "small:team:sql", "team:sql"):
            assert asked(http, name).json()["model"] == "tiny:team:sql"
        assert made.asked == ["team:sql"] * 3


def test_vectors_are_of_the_model_alone(http: httpx.Client) -> None:
    reply = http.post("/v1/embeddings", json={"model": "tiny:sql", "input": "a"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"


def test_a_pool_lists_the_adapters_of_models_that_are_not_loaded(engine: Engine) -> None:
    made: Any = Adapted(engine, "sql")
    models = [ServedModel(name, lambda _: made, adapters=("sql",) * (name == "one")) for name in ("one", "two")]
    with (
        ModelPool(models) as pool,
        listening(app(pool, ServerSettings())) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["one", "two", "one:sql"]
        assert not pool.loaded_engines() and asked(http, "two:sql").status_code == 404 and not pool.loaded_engines()
        assert asked(http, "one:sql").json()["model"] == "one:sql" and made.asked == ["sql"]
