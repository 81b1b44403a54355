"""An error as clients of the OpenAI API read it."""

from __future__ import annotations

import pytest
from openai.types.shared import ErrorObject

from cortexmlx.errors import CortexError, InvalidRequest, KVCacheFull, PromptTooLong
from cortexmlx.protocols.openai.errors import error_body, is_refusal


@pytest.mark.parametrize(
    ("error", "kind", "field", "code"),
    [
        (InvalidRequest("bad", field="messages[0].role"), "invalid_request_error", "messages[0].role", None),
        (InvalidRequest("bad"), "invalid_request_error", None, None),
        (PromptTooLong("bad"), "invalid_request_error", None, "context_length_exceeded"),
        (KVCacheFull("bad"), "server_error", None, None),
    ],
)
def test_an_error_says_whose_fault_it_is_and_in_which_field(
    error: CortexError, kind: str, field: str | None, code: str | None
) -> None:
    body = error_body(error)["error"]
    assert ErrorObject.model_validate(body, strict=True) == ErrorObject(
        message="bad", type=kind, param=field, code=code
    )
    assert is_refusal(error) is (kind == "invalid_request_error")
