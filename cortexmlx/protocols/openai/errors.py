"""Errors of the OpenAI API: as a body, and as the last event of a stream."""

from __future__ import annotations

from cortexmlx.errors import CortexError, InvalidRequest, PromptTooLong
from cortexmlx.protocols.reply import Body


def is_refusal(error: CortexError) -> bool:
    """Whether the request is at fault: status 400. The same request fails again."""
    return isinstance(error, InvalidRequest | PromptTooLong)


def error_body(error: CortexError) -> Body:
    """Return the body of an error. `param` is the path of the wrong field, if the error names one."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if is_refusal(error) else "server_error",
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": "context_length_exceeded" if isinstance(error, PromptTooLong) else None,
        }
    }
