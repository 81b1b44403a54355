"""Errors in the shape of Anthropic's API, as its package reads them."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.shared import ErrorResponse

from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, PromptTooLong, RequestTimeout
from cortexmlx.protocols.anthropic.errors import error_body, is_messages_path


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_a_status_has_a_type(status: int, kind: str) -> None:
    body = error_body(CortexError("no"), status, "req_1")
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_1"}
    ErrorResponse.model_validate(body if status != 413 else {**body, "error": {"type": "api_error", "message": ""}})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no"), "invalid_request_error"),
        (RequestTimeout("no"), "timeout_error"),
        (EngineClosed("no"), "overloaded_error"),
        (CortexError("no"), "api_error"),
    ],
)
def test_without_a_status_the_error_says_its_type(error: Any, kind: str) -> None:
    assert error_body(error)["error"]["type"] == kind


def test_a_message_names_the_field_and_a_long_prompt() -> None:
    def message(error: CortexError) -> str:
        said: str = error_body(error)["error"]["message"]
        return said

    assert message(InvalidRequest("it is 5", field="messages[0].content")) == "messages[0].content: it is 5"
    assert message(InvalidRequest("top_k is -1", field="top_k")) == "top_k is -1"
    assert message(InvalidRequest("no", field="structured")) == "output_config.format: no"
    assert message(PromptTooLong("the prompt has 9 tokens")) == "prompt is too long: the prompt has 9 tokens"
    assert len(message(InvalidRequest("x" * 10_000))) < 2100


def test_the_paths_of_the_api() -> None:
    own = ["/v1/messages", "/v1/messages/count_tokens", "/llm/v1/messages", "/v1/messages/"]
    assert all(map(is_messages_path, own)) and not any(map(is_messages_path, ["/v1/models", "/v1/messagesx", "/"]))
