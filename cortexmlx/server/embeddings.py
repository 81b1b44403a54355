"""HTTP endpoints that return numbers: embeddings of texts, and scores of documents for a query."""

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
from cortexmlx.protocols.ollama import embed
from cortexmlx.protocols.openai import embeddings
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest
from cortexmlx.protocols.request import Body
from cortexmlx.server.generation import GenerationEndpoints
from cortexmlx.server.http import (
    SCOPE_BODY_BYTES,
    SCOPE_CLIENT,
    SCOPE_MODEL,
    SCOPE_TOKENS,
    json_reply,
    run_by_size,
    run_until_disconnect,
    to_json_bytes,
)
from cortexmlx.server.model_pool import ModelLease
from cortexmlx.server.settings import RequestTokens
from cortexmlx.types.embeddings import Embeddings

T = TypeVar("T")

AnswerBody = Callable[[dict[str, Any], ModelLease, float], Awaitable[Response]]
"""Answers a body with the model that it asks for. The number is when the body was read, on the monotonic clock."""

_JSON_BYTES_PER_NUMBER = 20
"""Of a vector's number in JSON."""


class EmbeddingEndpoints:
    """The HTTP endpoints for embeddings and reranking. A client that disconnects cancels its request."""

    def __init__(self, generation: GenerationEndpoints) -> None:
        self._generation = generation

    async def embeddings(self, request: Request) -> Response:
        """Handle POST `/v1/embeddings`."""

        async def answer(body: dict[str, Any], lease: ModelLease, start_time: float) -> Response:
            info = lease.engine.info
            embedding_request = await run_by_size(
                request.scope[SCOPE_BODY_BYTES], lambda: embeddings.read(body, info.embedding, info.vocab_size)
            )
            result = await self._embed(request, lease, embedding_request, start_time)
            size = 0 if embedding_request.base64 else result.vectors.size * _JSON_BYTES_PER_NUMBER
            return await _list_reply(
                max(size, result.vectors.nbytes),
                lambda: (
                    embeddings.reply_without_items(result, lease.name),
                    "data",
                    embeddings.embedding_items(embedding_request, result),
                ),
            )

        return await self._handle(request, embeddings.read, answer)

    async def _embed(
        self, request: Request, lease: ModelLease, embedding_request: EmbeddingRequest, start_time: float
    ) -> Embeddings:
        """Return the embeddings that a body asks for."""
        options: dict[str, Any] = {"prompt": embedding_request.prompt, "dimensions": embedding_request.dimensions}
        work = lease.engine.aembed(
            embedding_request.inputs,
            **options,
            truncate=embedding_request.truncate,
            client=request.scope.get(SCOPE_CLIENT, ""),
        )
        result = await self._run_with_limits(request, work, start_time)
        request.scope[SCOPE_TOKENS] = RequestTokens(sum(result.prompt_tokens), sum(result.cached_tokens), 0)
        return result

    async def ollama_embed(self, request: Request) -> Response:
        """Handle POST `/api/embed`, and `/api/embeddings`, the older way to embed one text."""
        read: Any = embed.read_old if request.url.path.endswith(embed.OLD_URL) else embed.read

        async def answer(body: dict[str, Any], lease: ModelLease, start_time: float) -> Response:
            load_seconds = time.monotonic() - start_time
            asked = await run_by_size(request.scope[SCOPE_BODY_BYTES], lambda: read(body, lease.engine.info.embedding))
            result = await self._embed(request, lease, asked, start_time) if asked.inputs else None
            if read is embed.read_old:
                return json_reply(embed.write_old(result))
            return await _list_reply(
                0 if result is None else result.vectors.size * _JSON_BYTES_PER_NUMBER,
                lambda: (
                    embed.reply_without_items(result, lease.name, load_seconds, time.monotonic() - start_time),
                    "embeddings",
                    embed.embedding_items(result),
                ),
            )

        return await self._handle(request, read, answer)

    async def rerank(self, request: Request) -> Response:
        """Handle POST `/v1/rerank`: score documents for a query, the best first."""

        async def answer(body: dict[str, Any], lease: ModelLease, start_time: float) -> Response:
            rerank_request = await run_by_size(
                request.scope[SCOPE_BODY_BYTES], lambda: rerank.read(body, lease.engine.longest_request)
            )
            work = lease.engine.arerank(
                rerank_request.query,
                rerank_request.documents,
                instruction=rerank_request.instruction,
                truncate=rerank_request.truncate,
                client=request.scope.get(SCOPE_CLIENT, ""),
            )
            result = await self._run_with_limits(request, work, start_time)
            request.scope[SCOPE_TOKENS] = RequestTokens(result.prompt_tokens, result.cached_tokens, 0)
            reply_id = uuid.uuid4().hex
            return await _list_reply(
                request.scope[SCOPE_BODY_BYTES],
                lambda: (
                    rerank.reply_without_items(result, lease.name, reply_id),
                    "results",
                    rerank.result_items(rerank_request, result),
                ),
            )

        return await self._handle(request, rerank.read, answer)

    async def _handle(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], object],
        answer: AnswerBody,
    ) -> Response:
        """Read the body, lease its model, call `answer`, release the model. `read` checks the body before a load."""
        generation = self._generation
        with ExitStack() as exit_stack:
            body = await generation.read_body(request, exit_stack)
            start_time, name = time.monotonic(), body.get("model")
            if not generation.models.is_ready(name):  # a wrong body loads no model
                await run_by_size(request.scope[SCOPE_BODY_BYTES], lambda: read(body))
            lease = await generation.models.acquire(name, request)
            exit_stack.callback(lease.release)
            try:
                if lease.adapter is not None:
                    raise embeddings.unsupported_adapter_error(lease.name)
                request.scope[SCOPE_MODEL] = lease.name
                return await answer(body, lease, start_time)
            except EmbeddingRefused as error:  # a folder's path is nobody's business
                message, info = str(error), lease.engine.info
                raise EmbeddingRefused(message.replace(info.path, lease.name).replace(info.name, lease.name)) from None

    async def _run_with_limits(self, request: Request, work: Awaitable[T], start_time: float) -> T:
        """Await `work`; cancel it if the client disconnects, and raise RequestTimeout if the request's time is over."""
        timeout = self._generation.settings.timeout
        remaining_seconds = None if timeout is None else max(timeout - (time.monotonic() - start_time), 0.001)
        try:
            async with asyncio.timeout(remaining_seconds):
                return await run_until_disconnect(request, work)
        except TimeoutError as error:
            if isinstance(error, RequestTimeout):
                raise
            raise RequestTimeout(f"not all was computed within {timeout:g} s: ask for less") from None


async def _list_reply(size: int, make_parts: Callable[[], tuple[Body, str, Iterable[Any]]]) -> Response:
    """Return a JSON reply with a list of items, each serialized by itself so that other threads can run in between.
    `make_parts()` returns the body without the list, the name of the list's field, and the items. `size`: rough bytes.
    """

    def serialize_reply() -> bytes:
        body, name, items = make_parts()
        return to_json_bytes(body)[:-1] + b',"%s":[' % name.encode() + b",".join(map(to_json_bytes, items)) + b"]}"

    return Response(await run_by_size(size, serialize_reply), media_type="application/json")
