"""An error as clients of the OpenAI API read it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from openai.types.shared import ErrorObject

from cortexmlx.errors import CortexError, InvalidRequest, KVCacheFull, PromptTooLong
from cortexmlx.protocols.anthropic.errors import error_body as anthropic_body
from cortexmlx.protocols.openai.errors import error_body, is_client_error
from support.pages import ROOT


def texts_of(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, those in several parts as one, without docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            yield node.value


def test_no_message_tells_a_client_of_an_option_of_the_command_line() -> None:
    """Of what a request runs through. What starts a model or a server is told to those who start it."""
    rooms = ("execution", "kv", "models/tokenizers", "protocols", "scheduling", "serving", "sessions", "structured")
    files = [file for room in rooms for file in (ROOT / "cortexmlx" / room).rglob("*.py")]
    texts = [text for file in files for text in texts_of(ast.parse(file.read_text("utf-8")))]
    named = [text for text in texts if re.search(r"[ (]--[a-z]", text) and "%s" not in text]  # no lines of the log
    assert len(named) > 10
    assert not [text for text in named if "--" in error_body(CortexError(text))["error"]["message"]]
    told = anthropic_body(CortexError("raise it (max_request_tokens, --kv-memory) or not (--raw)."))
    assert told["error"]["message"] == "raise it (max_request_tokens) or not."


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
    assert is_client_error(error) is (kind == "invalid_request_error")
