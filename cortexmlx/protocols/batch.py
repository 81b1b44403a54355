"""The lines and records of a batch file. A line is a request or an error, a record is its answer or the error.

A record holds nothing that depends on how a run went, such as the time or the cached tokens. So the output of an
interrupted and resumed run has the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.error_text import bounded
from cortexmlx.protocols.fields import Unserved, check_fields
from cortexmlx.protocols.openai import chat_completions, completions, embeddings
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest
from cortexmlx.protocols.request import Body, Defaults, ReplyInfo, Request, TokenBytes
from cortexmlx.protocols.simple import no_adapter
from cortexmlx.types.embeddings import Embeddings
from cortexmlx.types.request import Completion

Identity = str | int
"""An id from the user."""

ENVELOPE = ("custom_id", "id", "method", "url", "body")
INVALID = "invalid_request"
_WHOLE = "the answers of a batch are whole"
UNSERVED = {
    "stream": Unserved(_WHOLE, (False,)),
    "stream_options": Unserved(_WHOLE),
    "previous_response_id": Unserved("nothing is remembered of other requests: send all messages"),
}
"""Fields that no line of a batch is served. The unserved fields of its protocol come on top."""


class Style(str, Enum):
    """The shape of an input line and of its output record."""

    CHAT = chat_completions.URL
    COMPLETIONS = completions.URL
    RESPONSES = responses.URL
    EMBEDDINGS = embeddings.URL
    SIMPLE = "simple"


class Protocol(typing.Protocol):
    """The functions in the module of a protocol."""

    def read(self, body: Mapping[str, Any], defaults: Defaults) -> Request:
        """Return the request in a body. Raises InvalidRequest."""

    def write(self, request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
        """Return the body of a reply. `answers` are the answers to each prompt."""


PROTOCOLS: Mapping[Style, Protocol] = {
    Style.CHAT: chat_completions,
    Style.COMPLETIONS: completions,
    Style.RESPONSES: responses,
    Style.SIMPLE: simple,
}
ENDPOINTS = {style.value: style for style in Style if style is not Style.SIMPLE}


@dataclass(frozen=True)
class BatchRequest:
    """One request of a batch."""

    line: int
    """The number of the line, from 1."""
    id: Identity
    """The user's id, or the number of the line."""
    style: Style
    request: Request | EmbeddingRequest


@dataclass(frozen=True)
class BadLine:
    """A line without a valid request, and the reason."""

    line: int
    id: Identity | None
    """None if the line does not say it."""
    style: Style
    message: str


def key_of(identity: Identity | None, line: int) -> str:
    """Return the key of a request and its record in all runs of a batch: the id, or the number of the line."""
    return f"line {line}" if identity is None else json.dumps(identity)


def identity_of(data: Mapping[str, Any], line: int) -> Identity:
    """Return the id of a line, or the number of the line if it has no id. Raises InvalidRequest for an invalid id."""
    names = [name for name in ("custom_id", "id") if data.get(name) is not None]
    if not names:
        return line
    identity = data[names[0]]
    if len(names) > 1:
        raise InvalidRequest("there are both `custom_id` and `id`: give one of them", field="id")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise InvalidRequest(f"{names[0]} is {identity!r:.80}, but must be a text or an integer", field=names[0])
    return identity


def style_of(data: Mapping[str, Any]) -> Style:
    """Return the style of a line. A line with an unknown `url` has the style of a chat."""
    url = data.get("url")
    if "body" not in data and "url" not in data:
        return Style.SIMPLE
    return ENDPOINTS.get(url, Style.CHAT) if isinstance(url, str) else Style.CHAT


def read_line(data: Mapping[str, Any], style: Style, defaults: Defaults, model: str = "") -> Request | EmbeddingRequest:
    """Return the request in a line. `model` is the name of the model that answers. Raises InvalidRequest."""
    if style is Style.SIMPLE:
        return simple.read(data, defaults)
    _check_envelope(data)
    named = data["body"].get("model")
    adapter = _adapter_in(named, model, defaults.adapters)
    if style is Style.EMBEDDINGS:
        if adapter is not None:
            raise embeddings.vectors_of_adapter(str(named))
        return embeddings.read(data["body"])
    return replace(PROTOCOLS[style].read(data["body"], defaults), adapter=adapter)


def _adapter_in(named: object, model: str, known: Collection[str]) -> str | None:
    """Return the adapter that a body names as its model: `model:adapter`, with any name of the model, or an adapter's
    own name; None: it names none, or has the model's own name. Raises InvalidRequest if `model` has no such adapter.
    """
    if not isinstance(named, str) or named == model:
        return None
    own = named.removeprefix(f"{model}:") if model else named  # both may have colons, too
    for name in (own, named):
        if name in known:
            return name
    if own != named:
        raise no_adapter(own, known, "model")
    return max((name for name in known if named.endswith(f":{name}")), key=len, default=None)


def _check_envelope(data: Mapping[str, Any]) -> None:
    check_fields(data, ENVELOPE, "a request around its `body`")
    if data.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {data['method']!r:.80}, but must be 'POST'", field="method")
    url = data.get("url", Style.CHAT.value)
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise InvalidRequest(f"url is {url!r:.80}, but must be one of {', '.join(ENDPOINTS)}", field="url")
    if not isinstance(data.get("body"), dict):
        raise InvalidRequest("`body` is missing or not an object", field="body")


class Recorder:
    """Makes the records of one run.

    `model` is the name of the model that answers. `created` is the time when the run first began, in seconds since
    1970. `token_bytes` gives the bytes of a token id.
    """

    def __init__(self, model: str, created: int, token_bytes: TokenBytes) -> None:
        self._model = model
        self._info = partial(ReplyInfo, model=model, created=created, token_bytes=token_bytes, repeatable=True)

    def answer(self, item: BatchRequest, answers: Sequence[Sequence[Completion]]) -> Body:
        """Return the record of a request. `answers` are the answers to each of its prompts."""
        assert isinstance(item.request, Request)
        body = PROTOCOLS[item.style].write(item.request, answers, self._info(str(item.line)))
        return {"id": item.id, **body} if item.style is Style.SIMPLE else self._reply(item, body)

    def embedded(self, item: BatchRequest, made: Embeddings) -> Body:
        """Return the record of a request for embeddings."""
        assert isinstance(item.request, EmbeddingRequest)
        return self._reply(item, embeddings.write(item.request, made, self._model, repeatable=True))

    @staticmethod
    def _reply(item: BatchRequest, body: Body) -> Body:
        response = {"status_code": 200, "request_id": f"req_{item.line}", "body": body}
        return {"id": f"batch_req_{item.line}", "custom_id": item.id, "response": response, "error": None}


def error_record(item: BatchRequest | BadLine, message: str, code: str = INVALID) -> Body:
    """Return the record with an error in the place of an answer, and the number of the line."""
    error = {"code": code, "message": bounded(message), "line": item.line}
    if item.style is Style.SIMPLE:
        return {"id": item.id, "error": error}
    return {"id": f"batch_req_{item.line}", "custom_id": item.id, "response": None, "error": error}


def key_of_record(record: Body) -> str | None:
    """Return the key of the request that a record belongs to (see `key_of`), or None if it is not a record of a
    batch.
    """
    identity: Identity | None = record.get("custom_id", record.get("id"))
    error = record.get("error")
    line = error.get("line") if isinstance(error, dict) else None
    if identity is None and not isinstance(line, int):
        return None
    return key_of(identity, line or 0) if isinstance(identity, str | int | None) else None
