"""HTTP endpoints of Ollama's API that generate nothing: the models, the version, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cortexmlx import __version__
from cortexmlx.protocols.ollama import embed, models
from cortexmlx.server.embeddings import EmbeddingEndpoints
from cortexmlx.server.generation import GenerationEndpoints
from cortexmlx.server.http import RequestHandler, RequestRefused, json_reply, with_error_replies

_REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/api/pull": ("POST", "models are not downloaded through this server: start it with the model's name"),
        "/api/delete": ("DELETE", "models are not deleted through this server: remove the files"),
        "/api/copy": ("POST", "models are not copied: the server's --alias gives one another name"),
        "/api/push": ("POST", "models are not uploaded: use the hub's own tools"),
        "/api/create": ("POST", "models are not made here: start the server with a folder, a .gguf file or a hub id"),
    }
)
"""Paths that are refused: the method, and why."""

PATHS = ("/api/tags", "/api/show", "/api/ps", "/api/version", embed.URL, embed.OLD_URL, *_REFUSED)
"""What is served, beside the two paths that generate text."""


class OllamaEndpoints:
    """The HTTP endpoints for Ollama's clients, besides chat and generate."""

    def __init__(self, generation: GenerationEndpoints, vectors: EmbeddingEndpoints) -> None:
        self._generation = generation
        self._vectors = vectors

    def routes(self) -> list[Route]:
        """Return the routes of all paths in PATHS."""
        return [
            Route("/api/tags", self.list_models, methods=["GET"]),
            Route("/api/show", with_error_replies(self.show), methods=["POST"]),
            Route("/api/ps", self.list_loaded, methods=["GET"]),
            Route("/api/version", self.version, methods=["GET"]),
            Route(embed.URL, with_error_replies(self._vectors.ollama_embed), methods=["POST"]),
            Route(embed.OLD_URL, with_error_replies(self._vectors.ollama_embeddings), methods=["POST"]),
            *(Route(path, _refuse(reason), methods=[method]) for path, (method, reason) in _REFUSED.items()),
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

    async def version(self, request: Request) -> Response:
        """Handle GET `/api/version`: Ollama's version whose API this is, and ours."""
        return json_reply({"version": models.API_VERSION, "cortexmlx": __version__})


def _refuse(reason: str) -> RequestHandler:
    """Return a request handler that refuses."""

    async def refuse(request: Request) -> Response:
        raise RequestRefused(403, reason)

    return with_error_replies(refuse)
