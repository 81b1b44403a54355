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
from cortexmlx.protocols.error_text import error_text, field_of
from cortexmlx.protocols.request import Body


class NotStored(InvalidRequest):
    """There is no such response for this client. Nothing tells whether it is another client's."""

    code = "previous_response_not_found"

    def __init__(self, id: str, *, field: str | None = None) -> None:
        why = "it was never stored, was deleted, or had to make room for newer ones"
        super().__init__(f"there is no response {id!r:.80} here: {why}. Send all items in `input` instead", field=field)


_REFUSALS = (InvalidRequest, PromptTooLong, EmbeddingRefused, UnknownAdapter, FormRefused)


def is_refusal(error: CortexError) -> bool:
    """Whether the request is at fault: status 400. The same request fails again. So does a form that turns out to be
    too complex while the answer is written.
    """
    return isinstance(error, _REFUSALS)


def error_body(error: CortexError) -> Body:
    """Return the body of an error. `param` is the path of the wrong field, if the error names one."""
    return {
        "error": {
            "message": error_text(error),
            "type": "invalid_request_error" if is_refusal(error) else "server_error",
            "param": field_of(error),
            "code": _code(error),
        }
    }


def _code(error: CortexError) -> str | None:
    if isinstance(error, NotStored):
        return error.code
    if isinstance(error, UnknownAdapter):
        return "model_not_found"
    return "context_length_exceeded" if isinstance(error, PromptTooLong) else None
