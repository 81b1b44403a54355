"""The paths that answer with numbers: the embeddings of texts, and how well documents answer a query."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx.errors import EmbeddingRefused, RequestTimeout
from cortexmlx.protocols import rerank
from cortexmlx.protocols.openai import embeddings
from cortexmlx.protocols.request import Body
from cortexmlx.server.generation import GenerationEndpoints
from cortexmlx.server.http import BODY_BYTES, CLIENT, MODEL, TOKENS, by_size, dumped, unless_gone
from cortexmlx.server.model_pool import Lease
from cortexmlx.server.settings import RequestTokens

T = TypeVar("T")

_BYTES_PER_NUMBER = 20
"""Of a vector's number in JSON."""


class EmbeddingEndpoints:
    """Answers who asks for embeddings and for scores of documents. A client that goes away cancels its request."""

    def __init__(self, generation: GenerationEndpoints) -> None:
        self._generation = generation

    async def embeddings(self, request: Request) -> Response:
        """Answer with the embeddings of texts."""

        async def answer(body: dict[str, Any], lease: Lease, began: float) -> Response:
            info = lease.engine.info
            asked = await self._read(request, lambda: embeddings.read(body, info.embedding, info.vocab_size))
            options: dict[str, Any] = {"prompt": asked.prompt, "dimensions": asked.dimensions}
            work = lease.engine.aembed(
                asked.inputs, **options, truncate=asked.truncate, client=request.scope.get(CLIENT, "")
            )
            made = await self._within(request, work, began)
            request.scope[TOKENS] = RequestTokens(sum(made.prompt_tokens), sum(made.cached_tokens), 0)
            size = 0 if asked.base64 else made.vectors.size * _BYTES_PER_NUMBER
            return await _reply(
                max(size, made.vectors.nbytes),
                lambda: (embeddings.without_data(made, lease.name), "data", embeddings.data(asked, made)),
            )

        return await self._answer(request, embeddings.read, answer)

    async def rerank(self, request: Request) -> Response:
        """Answer with the scores of documents, the best first."""

        async def answer(body: dict[str, Any], lease: Lease, began: float) -> Response:
            asked = await self._read(request, lambda: rerank.read(body, lease.engine.longest_request))
            work = lease.engine.arerank(
                asked.query,
                asked.documents,
                instruction=asked.instruction,
                truncate=asked.truncate,
                client=request.scope.get(CLIENT, ""),
            )
            made = await self._within(request, work, began)
            request.scope[TOKENS] = RequestTokens(made.prompt_tokens, made.cached_tokens, 0)
            named = uuid.uuid4().hex
            return await _reply(
                request.scope[BODY_BYTES],
                lambda: (rerank.without_results(made, lease.name, named), "results", rerank.results(asked, made)),
            )

        return await self._answer(request, rerank.read, answer)

    async def _answer(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], object],
        answer: Callable[[dict[str, Any], Lease, float], Awaitable[Response]],
    ) -> Response:
        """Answer with a model, which is given back at the end."""
        generation = self._generation
        with ExitStack() as held:
            body = await generation.body(request, held)
            began, name = time.monotonic(), body.get("model")
            if not generation.models.is_ready(name):  # a wrong body loads no model
                await self._read(request, lambda: read(body))
            lease = await generation.models.take(name, request)
            held.callback(lease.release)
            try:
                if lease.adapter is not None:
                    raise embeddings.vectors_of_adapter(lease.name)
                request.scope[MODEL] = lease.name
                return await answer(body, lease, began)
            except EmbeddingRefused as error:  # a folder's path is nobody's business
                said, info = str(error), lease.engine.info
                raise EmbeddingRefused(said.replace(info.path, lease.name).replace(info.name, lease.name)) from None

    @staticmethod
    async def _read(request: Request, work: Callable[[], T]) -> T:
        return await by_size(request.scope[BODY_BYTES], work)

    async def _within(self, request: Request, work: Awaitable[T], began: float) -> T:
        """Return what `work` returns, as long as the client is there, and within the time that a request has."""
        timeout = self._generation.settings.timeout
        left = None if timeout is None else max(timeout - (time.monotonic() - began), 0.001)
        try:
            async with asyncio.timeout(left):
                return await unless_gone(request, work)
        except TimeoutError as error:
            if isinstance(error, RequestTimeout):
                raise
            raise RequestTimeout(f"not all was computed within {timeout:g} s: ask for less") from None


async def _reply(size: int, parts: Callable[[], tuple[Body, str, Iterable[Body]]]) -> Response:
    """Return a reply of about `size` bytes: a body, and in it, under a name, a list of items. Each item is written by
    itself: Python's writer of JSON holds up all other threads until it is done.
    """

    def text() -> bytes:
        body, name, items = parts()
        return dumped(body)[:-1] + b',"%s":[' % name.encode() + b",".join(map(dumped, items)) + b"]}"

    return Response(await by_size(size, text), media_type="application/json")
