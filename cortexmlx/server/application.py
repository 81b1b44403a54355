"""The ASGI application: builds the endpoints and routes each URL path to its handler."""

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
from cortexmlx.server import ollama, stored_responses
from cortexmlx.server.embeddings import EmbeddingEndpoints
from cortexmlx.server.generation import PROTOCOLS, GenerationEndpoints
from cortexmlx.server.http import RequestRefused, error_reply, json_reply, with_error_replies
from cortexmlx.server.metrics import ServerCounters
from cortexmlx.server.middleware import PUBLIC_PATHS, AccessControl, PathNormalizer, RequestLog
from cortexmlx.server.model_pool import ModelPool
from cortexmlx.server.models import ModelDirectory
from cortexmlx.server.monitoring import LIVE_PATH, MonitoringEndpoints
from cortexmlx.server.settings import LoggedRequest, ServerSettings
from cortexmlx.server.stored_responses import ResponseEndpoints
from cortexmlx.types.messages import suggest_name

if TYPE_CHECKING:
    from cortexmlx.engine import Engine

PATHS = (
    *PROTOCOLS,
    messages.COUNT_URL,
    embeddings.URL,
    *rerank.URLS,
    *ollama.PATHS,
    "/v1/models",
    "/tokenize",
    "/health",
    "/metrics",
    "/cache/why",
    LIVE_PATH,
    "/",
)
"""What is served."""

GUIDE = "https://github.com/cortexmlx/cortexmlx/blob/main/docs/server.md"
"""The page on the server, for clients that have nothing else."""


def build_application(model_source: Engine | Mapping[str, Engine] | ModelPool, settings: ServerSettings) -> Starlette:
    """Build the ASGI application for an engine, several by name, or a pool."""
    models, tally = ModelDirectory(model_source, settings), ServerCounters(PATHS)
    generation, monitoring = GenerationEndpoints(models, settings, tally), MonitoringEndpoints(models, settings, tally)
    responses, vectors = ResponseEndpoints(generation.stored_responses), EmbeddingEndpoints(generation)

    def count_and_log(log_entry: LoggedRequest, path: str) -> None:
        """Count a request, and log it unless it is a poll by the monitoring page. `path` leaves out the mount path."""
        tally.count_reply(log_entry, path)
        if settings.log is not None and not (path == LIVE_PATH and log_entry.status == 200):
            settings.log(log_entry)

    routes = [
        *(Route(path, generation.handler(protocol), methods=["POST"]) for path, protocol in PROTOCOLS.items()),
        Route(stored_responses.RESPONSE_PATH, with_error_replies(responses.read_or_delete), methods=["GET", "DELETE"]),
        Route(stored_responses.INPUT_ITEMS_PATH, with_error_replies(responses.input_items), methods=["GET"]),
        Route(messages.COUNT_URL, with_error_replies(generation.count_tokens), methods=["POST"]),
        Route(embeddings.URL, with_error_replies(vectors.embeddings), methods=["POST"]),
        *(Route(path, with_error_replies(vectors.rerank), methods=["POST"]) for path in rerank.URLS),
        *ollama.OllamaEndpoints(generation, vectors).routes(),
        Route("/v1/models", models.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", with_error_replies(models.describe_model), methods=["GET"]),
        Route("/tokenize", with_error_replies(generation.tokenize), methods=["POST"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", with_error_replies(monitoring.metrics), methods=["GET"]),
        Route("/cache/why", with_error_replies(generation.explain_cache), methods=["GET"]),
        Route(LIVE_PATH, with_error_replies(monitoring.live), methods=["GET"]),
        Route("/", monitoring.root, methods=["GET"]),
    ]
    application = Starlette(
        routes=routes,
        middleware=[
            Middleware(PathNormalizer, paths=frozenset(PATHS) - {*PUBLIC_PATHS}),
            Middleware(RequestLog, write=count_and_log),
            Middleware(AccessControl, settings=settings),
        ],
        exception_handlers={404: _answer_wrong_path, 405: _answer_wrong_path, 500: _answer_internal_error},
    )
    application.state.generation = generation
    return application


async def _health(request: Request) -> Response:
    """Handle GET `/health`: report that the server runs."""
    return json_reply({"status": "ok"})


async def _answer_wrong_path(request: Request, error: Exception) -> Response:
    """Answer an unknown path by 404 with the nearest known path, or a wrong method by 405 with the allowed ones."""
    path = request.url.path
    if methods := ", ".join(sorted((getattr(error, "headers", None) or {}).get("Allow", "").split(", "))):
        message = f"{path[:200]} takes {methods}, not {request.method}"
        return error_reply(RequestRefused(405, message, headers={"allow": methods}), path)
    begun = [each for each in PATHS if len(path) > 3 and each.startswith(path.rstrip("/") + "/")]
    nearest = suggest_name(path[:200], PATHS) if len(begun) != 1 else f" (did you mean {begun[0]!r}?)"
    return error_reply(RequestRefused(404, f"{path[:200]} is not served{nearest}: {GUIDE} lists what is"), path)


async def _answer_internal_error(request: Request, error: Exception) -> Response:
    """Answer a request that raised an unexpected exception by 500. The traceback is logged, not sent."""
    return error_reply(CortexError(f"unexpected {type(error).__name__}"), request.url.path)
