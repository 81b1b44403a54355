"""Errors of Anthropic's API: as a body, and as an event of a stream."""

from __future__ import annotations

import re

from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, KVCacheFull, PromptTooLong, RequestTimeout
from cortexmlx.protocols.error_text import error_field, error_text
from cortexmlx.protocols.openai.errors import is_client_error
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
_FIELD_NAMES = {"structured": "output_config.format", "stop": "stop_sequences"}
"""Names of parameters in this API."""

_ERROR_CODES = {"thread": "thread_unsupported_request"}
"""The codes of fields that are not served, where Anthropic's packages go on without the field."""


def is_messages_path(path: str) -> bool:
    """Whether a URL path belongs to Anthropic's API. The application may be mounted below another path."""
    return re.search(r"/v1/messages(/|$)", path) is not None


def error_body(error: CortexError, status: int | None = None, request_id: str | None = None) -> Body:
    """Return the JSON body of an error. Without an HTTP `status`, the error's class decides its type. The message
    names the wrong field, since the body has no field for that.
    """
    kind = _error_type(error) if status is None else _BY_STATUS.get(status)
    if kind is None:
        kind = "invalid_request_error" if status is not None and status < 500 else "api_error"
    body: Body = {"type": "error", "error": {"type": kind, "message": _error_message(error)}}
    if isinstance(error, InvalidRequest) and error.field in _ERROR_CODES:
        body["error"]["details"] = {"error_code": _ERROR_CODES[error.field]}
    return body if request_id is None else {**body, "request_id": request_id}


def _error_type(error: CortexError) -> str:
    """Return Anthropic's name for the type of an error."""
    if is_client_error(error):
        return "invalid_request_error"
    if isinstance(error, RequestTimeout):
        return "timeout_error"
    return "overloaded_error" if isinstance(error, EngineClosed | KVCacheFull) else "api_error"


def _error_message(error: CortexError) -> str:
    """Return an error's message, which names the wrong field. Its first words tell agents of a prompt too long."""
    message, field = error_text(error), error_field(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"
    if field is not None and not message.startswith(field):
        message = f"{_FIELD_NAMES.get(field, field)}: {message}"
    return message
