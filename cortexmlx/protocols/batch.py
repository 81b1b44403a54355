"""Batch files: read an input line into a request, and write its output record. A line without a valid request gets an
error record.

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
from cortexmlx.protocols.error_text import shorten_message
from cortexmlx.protocols.fields import UnservedField, reject_unknown_fields
from cortexmlx.protocols.openai import chat_completions, completions, embeddings
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest
from cortexmlx.protocols.request import Body, ReplyInfo, Request, RequestDefaults, TokenBytes
from cortexmlx.protocols.simple import unknown_adapter_error
from cortexmlx.types.embeddings import Embeddings
from cortexmlx.types.request import Completion

LineId = str | int
"""An id from the user."""

ENVELOPE = ("custom_id", "id", "method", "url", "body")
INVALID_REQUEST = "invalid_request"
_NO_STREAMING = "the answers of a batch are whole"
UNSERVED = {
    "stream": UnservedField(_NO_STREAMING, (False,)),
    "stream_options": UnservedField(_NO_STREAMING),
    "previous_response_id": UnservedField("nothing is remembered of other requests: send all messages"),
}
"""Fields that no line of a batch is served. The unserved fields of its protocol come on top."""


class LineStyle(str, Enum):
    """The JSON shape of an input line and of its output record: that of an OpenAI endpoint, or our own simple one."""

    CHAT = chat_completions.URL
    COMPLETIONS = completions.URL
    RESPONSES = responses.URL
    EMBEDDINGS = embeddings.URL
    SIMPLE = "simple"


class ProtocolModule(typing.Protocol):
    """The two functions that every protocol's module has: `read` a body, `write` a reply."""

    def read(self, body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
        """Parse a JSON body into a Request. Raises InvalidRequest."""

    def write(self, request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
        """Return the JSON body of a reply. `answers` has, for each prompt, its answers."""


PROTOCOLS: Mapping[LineStyle, ProtocolModule] = {
    LineStyle.CHAT: chat_completions,
    LineStyle.COMPLETIONS: completions,
    LineStyle.RESPONSES: responses,
    LineStyle.SIMPLE: simple,
}
ENDPOINTS = {style.value: style for style in LineStyle if style is not LineStyle.SIMPLE}


@dataclass(frozen=True)
class BatchRequest:
    """A request that was read from one line of a batch file."""

    line: int
    """The number of the line, from 1."""
    id: LineId
    """The user's id, or the number of the line."""
    style: LineStyle
    request: Request | EmbeddingRequest


@dataclass(frozen=True)
class InvalidLine:
    """A line of a batch file that has no valid request, with the reason."""

    line: int
    id: LineId | None
    """None if the line does not say it."""
    style: LineStyle
    message: str


def request_key(identity: LineId | None, line: int) -> str:
    """Return the key by which a resumed batch finds a request's output record: its id, or else its line number."""
    return f"line {line}" if identity is None else json.dumps(identity)


def read_line_id(data: Mapping[str, Any], line: int) -> LineId:
    """Return the id of a line (`custom_id` or `id`), or else its number. Raises InvalidRequest for an invalid id."""
    names = [name for name in ("custom_id", "id") if data.get(name) is not None]
    if not names:
        return line
    identity = data[names[0]]
    if len(names) > 1:
        raise InvalidRequest("there are both `custom_id` and `id`: give one of them", field="id")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise InvalidRequest(f"{names[0]} is {identity!r:.80}, but must be a text or an integer", field=names[0])
    return identity


def line_style(data: Mapping[str, Any]) -> LineStyle:
    """Return the style of a line. A line with an unknown `url` has the style of a chat."""
    url = data.get("url")
    if "body" not in data and "url" not in data:
        return LineStyle.SIMPLE
    return ENDPOINTS.get(url, LineStyle.CHAT) if isinstance(url, str) else LineStyle.CHAT


def read_line(
    data: Mapping[str, Any], style: LineStyle, defaults: RequestDefaults, model: str = ""
) -> Request | EmbeddingRequest:
    """Parse a line's JSON object into a request. `model` names the model that answers. Raises InvalidRequest."""
    if style is LineStyle.SIMPLE:
        return simple.read(data, defaults)
    _check_envelope(data)
    requested_model = data["body"].get("model")
    adapter = _find_adapter(requested_model, model, defaults.adapters)
    if style is LineStyle.EMBEDDINGS:
        if adapter is not None:
            raise embeddings.unsupported_adapter_error(str(requested_model))
        return embeddings.read(data["body"])
    return replace(PROTOCOLS[style].read(data["body"], defaults), adapter=adapter)


def _find_adapter(requested_model: object, model: str, adapter_names: Collection[str]) -> str | None:
    """Return the LoRA adapter that a body's `model` names, alone or as `MODEL:ADAPTER` with any name of the model;
    None if it names none. Raises InvalidRequest if it begins with `model:`, and no adapter has the name after it.
    """
    if not isinstance(requested_model, str) or requested_model == model:
        return None
    adapter_name = requested_model.removeprefix(f"{model}:") if model else requested_model  # both may have colons, too
    for name in (adapter_name, requested_model):
        if name in adapter_names:
            return name
    if adapter_name != requested_model:
        raise unknown_adapter_error(adapter_name, adapter_names, "model")
    return max((name for name in adapter_names if requested_model.endswith(f":{name}")), key=len, default=None)


def _check_envelope(data: Mapping[str, Any]) -> None:
    """Raise InvalidRequest unless `method` and `url` are valid, `body` is an object, and fields beside it are known."""
    reject_unknown_fields(data, ENVELOPE, "a request around its `body`")
    if data.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {data['method']!r:.80}, but must be 'POST'", field="method")
    url = data.get("url", LineStyle.CHAT.value)
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise InvalidRequest(f"url is {url!r:.80}, but must be one of {', '.join(ENDPOINTS)}", field="url")
    if not isinstance(data.get("body"), dict):
        raise InvalidRequest("`body` is missing or not an object", field="body")


class RecordBuilder:
    """Builds the output records of one batch run.

    `model` is the name of the model that answers. `created` is the time when the run first began, in seconds since
    1970. `token_bytes` gives the bytes of a token id.
    """

    def __init__(self, model: str, created: int, token_bytes: TokenBytes) -> None:
        self._model = model
        self._info = partial(ReplyInfo, model=model, created=created, token_bytes=token_bytes, repeatable=True)

    def completion_record(self, item: BatchRequest, answers: Sequence[Sequence[Completion]]) -> Body:
        """Return the record of a request that generated text. `answers` has, for each of its prompts, the answers."""
        assert isinstance(item.request, Request)
        body = PROTOCOLS[item.style].write(item.request, answers, self._info(str(item.line)))
        return {"id": item.id, **body} if item.style is LineStyle.SIMPLE else self._success_record(item, body)

    def embedding_record(self, item: BatchRequest, result: Embeddings) -> Body:
        """Return the record of a request for embeddings."""
        assert isinstance(item.request, EmbeddingRequest)
        return self._success_record(item, embeddings.write(item.request, result, self._model, repeatable=True))

    @staticmethod
    def _success_record(item: BatchRequest, body: Body) -> Body:
        """Return an OpenAI-style record with status 200 around the body of a reply."""
        response = {"status_code": 200, "request_id": f"req_{item.line}", "body": body}
        return {"id": f"batch_req_{item.line}", "custom_id": item.id, "response": response, "error": None}


def error_record(item: BatchRequest | InvalidLine, message: str, code: str = INVALID_REQUEST) -> Body:
    """Return the record of a line that failed: an error with its message and the line's number."""
    error = {"code": code, "message": shorten_message(message), "line": item.line}
    if item.style is LineStyle.SIMPLE:
        return {"id": item.id, "error": error}
    return {"id": f"batch_req_{item.line}", "custom_id": item.id, "response": None, "error": error}


def record_key(record: Body) -> str | None:
    """Return the key of the request that a record answers (see `request_key`); None if it is no record of a batch."""
    identity: LineId | None = record.get("custom_id", record.get("id"))
    error = record.get("error")
    line = error.get("line") if isinstance(error, dict) else None
    if identity is None and not isinstance(line, int):
        return None
    return request_key(identity, line or 0) if isinstance(identity, str | int | None) else None
