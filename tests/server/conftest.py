"""A server with a tiny model that calls tools, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpcore2
import httpx2 as httpx
import openai
import pytest

from cortexmlx import Engine
from cortexmlx.server import ServerSettings, app
from support.clients.in_process import InProcess, in_process
from support.clients.listening import listening
from support.engine.core_driver import finally_nothing_lost
from support.models.calling import write_calling

Serve = Callable[..., str]
httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)  # reads all certificates, for each client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling(tmp_path_factory.mktemp("calling") / "tiny", "hermes")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), kv_memory="16MB", max_rows=4) as opened:
        yield opened


@pytest.fixture
def served(engine: Engine) -> Any:
    """What is served: the engine, unless a module has something else."""
    return engine


@pytest.fixture
def serve(served: Any, engine: Engine) -> Iterator[Serve]:
    """Serve on a socket, with some settings. Return the address."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(listening(app(served, ServerSettings(**options))))
    finally_nothing_lost(engine)


@pytest.fixture
def ask(served: Any, engine: Engine) -> Iterator[Callable[..., httpx.Client]]:
    """Return clients of a server without a socket: for all that does not depend on one."""
    with ExitStack() as stack:

        def make(**options: Any) -> httpx.Client:
            made = in_process(app(served, ServerSettings(**options)))
            stack.callback(made.close)
            return made

        yield make
    finally_nothing_lost(engine)


@pytest.fixture
def http(ask: Callable[..., httpx.Client]) -> httpx.Client:
    return ask()


@pytest.fixture
def client(served: Any, engine: Engine) -> Iterator[openai.OpenAI]:
    web = openai.DefaultHttpxClient(transport=InProcess(app(served)))
    with openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=web) as made:
        yield made
    finally_nothing_lost(engine)
