"""HTTP endpoints of Ollama's API that generate nothing: the models, downloads, the version, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cortexmlx import __version__
from cortexmlx.core.blocking_calls import run_on_thread
from cortexmlx.protocols.ollama import embed, models
from cortexmlx.protocols.ollama.errors import error_body
from cortexmlx.server.embeddings import EmbeddingEndpoints
from cortexmlx.server.generation import GenerationEndpoints
from cortexmlx.server.http import (
    LINES_TYPE,
    EventStream,
    RequestHandler,
    RequestRefused,
    error_for_client,
    json_line,
    json_reply,
    run_until_disconnect,
    with_error_replies,
)
from cortexmlx.types.progress import OnProgress, Progress

_REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/api/delete": ("DELETE", "models are not deleted through this server: remove the files"),
        "/api/copy": ("POST", "models are not copied: the server's --alias gives one another name"),
        "/api/push": ("POST", "models are not uploaded: use the hub's own tools"),
        "/api/create": ("POST", "models are not made here: start the server with a folder, a .gguf file or a hub id"),
    }
)
"""Paths that are refused: the method, and why."""

_PULL_SECONDS = 0.5
"""Between two lines about a download, at most."""

PATHS = ("/api/tags", "/api/show", "/api/ps", "/api/version", "/api/pull", embed.URL, embed.OLD_URL, *_REFUSED)
"""What is served, beside the two paths that generate text."""


class OllamaEndpoints:
    """The HTTP endpoints for Ollama's clients, besides chat and generate."""

    def __init__(self, generation: GenerationEndpoints, vectors: EmbeddingEndpoints) -> None:
        self._generation = generation
        self._vectors = vectors
        self._pull_lock = threading.Lock()

    def routes(self) -> list[Route]:
        """Return the routes of all paths in PATHS."""
        return [
            Route("/api/tags", self.list_models, methods=["GET"]),
            Route("/api/show", with_error_replies(self.show), methods=["POST"]),
            Route("/api/ps", self.list_loaded, methods=["GET"]),
            Route("/api/version", self.version, methods=["GET"]),
            Route("/api/pull", with_error_replies(self.pull), methods=["POST"]),
            *(
                Route(path, with_error_replies(self._vectors.ollama_embed), methods=["POST"])
                for path in (embed.URL, embed.OLD_URL)
            ),
            *(Route(path, _refusing_handler(reason), methods=[method]) for path, (method, reason) in _REFUSED.items()),
        ]

    async def list_models(self, request: Request) -> Response:
        """Handle GET `/api/tags`: all names of models and adapters. Nothing is loaded."""
        directory = self._generation.models
        return json_reply(models.list_models([directory.facts(name) for name in directory.names]))

    async def list_loaded(self, request: Request) -> Response:
        """Handle GET `/api/ps`: the models in memory."""
        directory = self._generation.models
        return json_reply(models.list_loaded([directory.facts(name) for name, _ in directory.loaded_engines()]))

    async def show(self, request: Request) -> Response:
        """Handle POST `/api/show`: describe a model, without loading it."""
        with ExitStack() as exit_stack:
            body = await self._generation.read_body(request, exit_stack)
            return json_reply(models.show(self._generation.models.facts(models.read_show(body))))

    async def pull(self, request: Request) -> Response:
        """Handle POST `/api/pull`: download a model and serve it, if the settings allow it, and say how far it is."""
        with ExitStack() as exit_stack:
            name, is_stream = models.read_pull(await self._generation.read_body(request, exit_stack))
            fetch, is_served = self._generation.settings.pull, self._generation.models.has(name)
            if fetch is None and not is_served:
                raise RequestRefused(
                    403, "models are not downloaded through this server: start it with the model's name"
                )
            lines = self._pull_lines(name, None) if is_served else self._pull_lines(models.hub_id(name), fetch)
            if is_stream:
                return EventStream(_end_with_error(lines), exit_stack.pop_all().close, media_type=LINES_TYPE)

            async def read_last_line() -> Any:
                return [json.loads(line) async for line in lines][-1]

            return json_reply(await run_until_disconnect(request, read_last_line()))

    async def _pull_lines(self, name: str, fetch: Callable[[str, OnProgress], None] | None) -> AsyncIterator[bytes]:
        """Yield the lines of a pull: its progress, and its end. `fetch` downloads; None if the model is served already.
        One download runs at a time. If the client disconnects, a running download goes on; a waiting one is dropped.
        Raises what the download raises.
        """
        status = {"status": "pulling manifest"}
        yield json_line(status)
        if fetch is not None:
            progress: deque[Progress] = deque(maxlen=1)
            while not self._pull_lock.acquire(blocking=False):
                await asyncio.sleep(_PULL_SECONDS)
                yield json_line(status)  # many clients give up on silence
            task = asyncio.ensure_future(run_on_thread(lambda: fetch(name, progress.append)))
            task.add_done_callback(lambda done: self._pull_lock.release())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            while not task.done():
                await asyncio.wait((task,), timeout=_PULL_SECONDS)
                if progress:
                    status = models.pull_status(name, progress.pop())
                yield json_line(status)
            task.result()
        yield json_line({"status": "success"})

    async def version(self, request: Request) -> Response:
        """Handle GET `/api/version`: return the version of Ollama whose API is served, and our own."""
        return json_reply({"version": models.API_VERSION, "cortexmlx": __version__})


async def _end_with_error(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. If it raises an error, that becomes the last line."""
    try:
        async for line in lines:
            yield line
    except BaseException as error:
        if (client_error := error_for_client(error)) is None:
            raise
        yield json_line(error_body(client_error))


def _refusing_handler(reason: str) -> RequestHandler:
    """Return a handler that refuses every request by 403 with this reason."""

    async def refuse(request: Request) -> Response:
        raise RequestRefused(403, reason)

    return with_error_replies(refuse)
