"""The ASGI application: which path is answered by what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cortexmlx.errors import CortexError
from cortexmlx.protocols import rerank
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.openai import embeddings
from cortexmlx.server import stored_responses
from cortexmlx.server.embeddings import EmbeddingEndpoints
from cortexmlx.server.generation import PROTOCOLS, GenerationEndpoints
from cortexmlx.server.http import RequestRefused, error_reply, json_reply, with_error_replies
from cortexmlx.server.metrics import Tally
from cortexmlx.server.middleware import OPEN, Access, RequestLog, UsualPaths
from cortexmlx.server.model_pool import ModelPool
from cortexmlx.server.models import Models
from cortexmlx.server.monitoring import LIVE, Monitoring
from cortexmlx.server.settings import LoggedRequest, ServerSettings
from cortexmlx.server.stored_responses import ResponseEndpoints

if TYPE_CHECKING:
    from cortexmlx.engine import Engine

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
    models, tally = Models(served, settings), Tally(PATHS)
    generation, monitoring = GenerationEndpoints(models, settings, tally), Monitoring(models, settings, tally)
    responses, vectors = ResponseEndpoints(generation.stored), EmbeddingEndpoints(generation)

    def log(logged: LoggedRequest, path: str) -> None:
        """Count and log a request. `path` is without what the server is mounted under. The page's own requests are not
        logged: they would fill the log.
        """
        tally.count_reply(logged, path)
        if settings.log is not None and not (path == LIVE and logged.status == 200):
            settings.log(logged)

    routes = [
        *(Route(path, generation.handler(protocol), methods=["POST"]) for path, protocol in PROTOCOLS.items()),
        Route(stored_responses.ONE, with_error_replies(responses.read_or_delete), methods=["GET", "DELETE"]),
        Route(stored_responses.INPUT_ITEMS, with_error_replies(responses.input_items), methods=["GET"]),
        Route(messages.COUNT_URL, with_error_replies(generation.count_tokens), methods=["POST"]),
        Route(embeddings.URL, with_error_replies(vectors.embeddings), methods=["POST"]),
        *(Route(path, with_error_replies(vectors.rerank), methods=["POST"]) for path in rerank.URLS),
        Route("/v1/models", models.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", models.describe_model, methods=["GET"]),
        Route("/tokenize", with_error_replies(generation.tokenize), methods=["POST"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", with_error_replies(monitoring.metrics), methods=["GET"]),
        Route(LIVE, with_error_replies(monitoring.live), methods=["GET"]),
        Route("/", monitoring.root, methods=["GET"]),
    ]
    made = Starlette(
        routes=routes,
        middleware=[
            Middleware(UsualPaths, paths=frozenset(PATHS) - {*OPEN}),
            Middleware(RequestLog, write=log),
            Middleware(Access, settings=settings),
        ],
        exception_handlers={404: _missing, 405: _missing, 500: _failed},
    )
    made.state.generation = generation
    return made


async def _health(request: Request) -> Response:
    """Say that the server runs."""
    return json_reply({"status": "ok"})


async def _missing(request: Request, error: Exception) -> Response:
    """Name the paths that there are."""
    status: int = getattr(error, "status_code", 404)
    path = request.url.path
    why = "is not served" if status == 404 else f"does not take {request.method}"
    return error_reply(RequestRefused(status, f"{path[:200]} {why}: there are {', '.join(PATHS)}"), path)


async def _failed(request: Request, error: Exception) -> Response:
    """Tell of a bug without its traceback, which is logged."""
    return error_reply(CortexError(f"unexpected {type(error).__name__}"), request.url.path)
