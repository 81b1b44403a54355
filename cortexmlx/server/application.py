"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cortexmlx.errors import CortexError
from cortexmlx.protocols import rerank
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.openai import embeddings
from cortexmlx.server import response_paths
from cortexmlx.server.access import OPEN, Access
from cortexmlx.server.asking import Asking, guarded
from cortexmlx.server.embedding_paths import EmbeddingPaths
from cortexmlx.server.http import Refused, error_reply, json_reply
from cortexmlx.server.model_pool import ModelPool
from cortexmlx.server.models import Models
from cortexmlx.server.protocols import PROTOCOLS
from cortexmlx.server.request_log import RequestLog, path_in
from cortexmlx.server.response_paths import ResponsePaths
from cortexmlx.server.settings import ServerSettings
from cortexmlx.server.watching import LIVE, Watching

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


_VERSION = "/v1"


class UsualPaths:
    """An ASGI middleware that serves them under the path that is meant. A redirection would lose the body."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer."""
        if scope["type"] == "http":
            scope = {**scope, "path": scope.get("root_path", "") + self.meant(path_in(scope))}
        await self._app(scope, receive, send)

    def meant(self, path: str) -> str:
        """Return the path that is served for this one: the same, if none is."""
        plain = re.sub(r"/{2,}", "/", path)
        plain = plain.rstrip("/") or "/"
        bare = re.sub(rf"^(?:{_VERSION})+(?=/)", "", plain)
        return next((each for each in (plain, _VERSION + bare, bare) if self._serves(each)), path)

    def _serves(self, path: str) -> bool:
        """Return whether a path is served, or is that of one thing of a list, such as a model."""
        return path in self._paths or any(path.startswith(f"{each}/") for each in self._paths if each.startswith("/v1"))


PATHS = (
    *PROTOCOLS,
    messages.COUNT_URL,
    embeddings.URL,
    *rerank.URLS,
    "/v1/models",
    "/tokenize",
    "/health",
    "/metrics",
    LIVE,
    "/",
)
"""What is served."""


def application(served: Engine | Mapping[str, Engine] | ModelPool, settings: ServerSettings) -> Starlette:
    """Return the application of an engine, of several by name, or of a pool."""
    models = Models(served, settings)
    watching = Watching(models, settings, PATHS)
    asking, other = Asking(models, settings, watching.tally), _Other()
    responses, numbers = ResponsePaths(asking.stored), EmbeddingPaths(asking)
    routes = [
        *(Route(path, asking.asked(protocol), methods=["POST"]) for path, protocol in PROTOCOLS.items()),
        Route(response_paths.ONE, guarded(responses.one), methods=["GET", "DELETE"]),
        Route(response_paths.INPUT_ITEMS, guarded(responses.input_items), methods=["GET"]),
        Route(messages.COUNT_URL, guarded(asking.count_tokens), methods=["POST"]),
        Route(embeddings.URL, guarded(numbers.embeddings), methods=["POST"]),
        *(Route(path, guarded(numbers.rerank), methods=["POST"]) for path in rerank.URLS),
        Route("/v1/models", models.listed, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        Route("/tokenize", guarded(asking.tokenize), methods=["POST"]),
        Route("/health", other.health, methods=["GET"]),
        Route("/metrics", guarded(watching.metrics), methods=["GET"]),
        Route(LIVE, guarded(watching.live), methods=["GET"]),
        Route("/", watching.root, methods=["GET"]),
    ]
    made = Starlette(
        routes=routes,
        middleware=[
            Middleware(UsualPaths, paths=frozenset(PATHS) - {*OPEN}),
            Middleware(RequestLog, write=watching.logged),
            Middleware(Access, settings=settings),
        ],
        exception_handlers={404: other.missing, 405: other.missing, 500: other.failed},
    )
    made.state.asking = asking
    return made


class _Other:
    """The paths that ask nothing of a model."""

    async def health(self, request: Request) -> Response:
        """Say that the server runs."""
        return json_reply({"status": "ok"})

    async def missing(self, request: Request, error: Exception) -> Response:
        """Name the paths that there are."""
        status: int = getattr(error, "status_code", 404)
        path = request.url.path
        why = "is not served" if status == 404 else f"does not take {request.method}"
        return error_reply(Refused(status, f"{path[:200]} {why}: there are {', '.join(PATHS)}"), path)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Tell of a bug without its traceback, which is logged."""
        return error_reply(CortexError(f"unexpected {type(error).__name__}"), request.url.path)
