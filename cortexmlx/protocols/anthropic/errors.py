"""Errors of Anthropic's API: as a body, and as an event of a stream."""

from __future__ import annotations

import re

from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, KVCacheFull, PromptTooLong, RequestTimeout
from cortexmlx.protocols.error_text import error_text, field_of
from cortexmlx.protocols.openai.errors import is_refusal
from cortexmlx.protocols.request import Body

_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = {"structured": "output_config.format", "stop": "stop_sequences"}
"""Names of parameters in this API."""

_DETAILS = {"thread": "thread_unsupported_request"}
"""The codes of fields that are not served, where Anthropic's packages go on without the field."""


def is_own_path(path: str) -> bool:
    """Whether a path belongs to this API. The application may be mounted somewhere."""
    return re.search(r"/v1/messages(/|$)", path) is not None


def error_body(error: CortexError, status: int | None = None, request_id: str | None = None) -> Body:
    """Return the body of an error. Without a `status`, the error's class says its type. The message names the wrong
    field, since the body has no place for it.
    """
    kind = _type_of(error) if status is None else _BY_STATUS.get(status)
    if kind is None:
        kind = "invalid_request_error" if status is not None and status < 500 else "api_error"
    body: Body = {"type": "error", "error": {"type": kind, "message": _message(error)}}
    if isinstance(error, InvalidRequest) and error.field in _DETAILS:
        body["error"]["details"] = {"error_code": _DETAILS[error.field]}
    return body if request_id is None else {**body, "request_id": request_id}


def _type_of(error: CortexError) -> str:
    if is_refusal(error):
        return "invalid_request_error"
    if isinstance(error, RequestTimeout):
        return "timeout_error"
    return "overloaded_error" if isinstance(error, EngineClosed | KVCacheFull) else "api_error"


def _message(error: CortexError) -> str:
    """Return the message. Agents recognise a prompt that is too long by its first words, and then shorten it."""
    message, field = error_text(error), field_of(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"
    if field is not None and not message.startswith(field):
        message = f"{_NAMES.get(field, field)}: {message}"
    return message
