"""Errors of the OpenAI API: as a body, and as the last event of a stream."""

from __future__ import annotations

from cortexmlx.errors import (
    CortexError,
    EmbeddingRefused,
    FormRefused,
    InvalidRequest,
    PromptTooLong,
    UnknownAdapter,
)
from cortexmlx.protocols.error_text import error_field, error_text
from cortexmlx.protocols.request import Body


class ResponseNotFound(InvalidRequest):
    """Raised if this client has no stored response with an id. The message does not tell whether another client has."""

    code = "previous_response_not_found"

    def __init__(self, id: str, *, field: str | None = None) -> None:
        reason = "it was never stored, was deleted, or had to make room for newer ones"
        super().__init__(
            f"there is no response {id!r:.80} here: {reason}. Send all items in `input` instead", field=field
        )


_CLIENT_ERRORS = (InvalidRequest, PromptTooLong, EmbeddingRefused, UnknownAdapter, FormRefused)


def is_client_error(error: CortexError) -> bool:
    """Return whether the request itself is at fault, so that it would fail again: HTTP status 400, unless `http_status`
    of the server has a more specific one. A schema or grammar that turns out too complex only later counts, too.
    """
    return isinstance(error, _CLIENT_ERRORS)


def error_body(error: CortexError) -> Body:
    """Return the JSON body of an error. `param` is the path of the wrong field, if the error names one."""
    return {
        "error": {
            "message": error_text(error),
            "type": "invalid_request_error" if is_client_error(error) else "server_error",
            "param": error_field(error),
            "code": _error_code(error),
        }
    }


def _error_code(error: CortexError) -> str | None:
    """Return the OpenAI API's `code` of an error, or None."""
    if isinstance(error, ResponseNotFound):
        return error.code
    if isinstance(error, UnknownAdapter):
        return "model_not_found"
    return "context_length_exceeded" if isinstance(error, PromptTooLong) else None
