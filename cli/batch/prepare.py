"""Prepare a prompt of a batch for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cortexmlx.cli.prompts import as_prompt, calls_left_out
from cortexmlx.cli.terminal.text import clean
from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import ChatPrompt
from cortexmlx.protocols.request import Asked, Request

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.serving.prompt import Prompt


def prepared(engine: Engine, system: str | None, request: Request, asked: Asked) -> Prompt:
    """A text goes through the chat template, unless it is raw; messages without a system prompt get `system`.

    Raises InvalidRequest for tool calls that the model's chat template leaves out.
    """
    if isinstance(asked, str):
        return asked if request.raw else as_prompt(engine, asked, system, raw=False, variables=request.template_vars)
    messages: list[Any] = list(asked)
    if not messages or isinstance(messages[0], int):
        return messages
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": clean(system, "--system")})
    if left_out := calls_left_out(engine, messages):
        raise InvalidRequest(f"{left_out}: write into `content` what was called")
    return ChatPrompt(messages, request.template_vars) if request.template_vars else messages
