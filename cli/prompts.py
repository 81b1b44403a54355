"""Prompts as commands submit them: through the model's chat template, with variables from the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from cortexmlx.cli.terminal.text import clean_argument
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.request import PromptInput, Request
from cortexmlx.types.messages import NO_VARIABLES, THINKING, ChatPrompt, TemplateVars
from cortexmlx.types.request import Message

if TYPE_CHECKING:
    from cortexmlx.core.prompt import Prompt
    from cortexmlx.engine import Engine


def make_prompt(
    engine: Engine, text: str, system: str | None, raw: bool, variables: TemplateVars = NO_VARIABLES
) -> str | list[Message] | ChatPrompt:
    """Return a prompt for a text: messages for a model with a chat template, else plain text."""
    if raw or not engine.info.chat_template:
        if variables:
            raise InvalidRequest(
                f"{engine.info.name} has no chat template, so there is nothing to set: {', '.join(variables)}"
            )
        if system is not None:
            raise InvalidRequest(
                f"{engine.info.name} has no chat template, so --system has no place: put it into the prompt"
            )
        return text
    messages: list[Message] = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": clean_argument(system, "--system")})
    return ChatPrompt(messages, variables) if variables else messages


def parse_template_vars(assignments: list[str] | None, think: bool | None, *, raw: bool = False) -> dict[str, object]:
    """Return the --template-var and --think variables. Raises typer.BadParameter for a wrong one, or any with `raw`."""
    variables: dict[str, object] = {} if think is None else {THINKING: think}
    for each in assignments or ():
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{each!r} is not NAME=VALUE", param_hint="--template-var")
        variables[name] = parse_json_or_text(value)
    if raw and variables:
        raise typer.BadParameter("--template-var and --think need the chat template, which --raw leaves out")
    return variables


def parse_json_or_text(value: str) -> object:
    """Parse a value as JSON, such as `false`, `3` and `["a"]`, or else return it as text."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def check_variables(engine: Engine, variables: dict[str, object]) -> dict[str, object]:
    """Return the variables. Raises InvalidRequest if the model's template does not read one of them or fails with it.
    So a wrong variable is found before any turn or request.
    """
    if variables:
        engine.encode(make_prompt(engine, "?", None, raw=False, variables=variables))
    return variables


def lost_calls_note(engine: Engine, messages: Sequence[Message]) -> str:
    """Return a note if the template leaves out tool calls, else "". Raises InvalidRequest if it refuses `messages`."""
    if not any("tool_calls" in message for message in messages):
        return ""
    # without images, which would be prepared only for this
    messages = [{**m, "content": text if isinstance(text := m.get("content"), str) else ""} for m in messages]
    stripped_messages = [{name: value for name, value in m.items() if name != "tool_calls"} for m in messages]
    if engine.encode(messages) != engine.encode(stripped_messages):
        return ""
    return f"the chat template of {engine.info.name} leaves out `tool_calls`, so the model does not see them"


def prepare_prompt(engine: Engine, system: str | None, request: Request, prompt_input: PromptInput) -> Prompt:
    """Return the prompt of a request to submit. A text goes through the chat template, unless it is raw. Messages
    without a system prompt get `system`.

    Raises InvalidRequest for tool calls that the model's chat template leaves out.
    """
    if isinstance(prompt_input, str):
        return (
            prompt_input
            if request.raw
            else make_prompt(engine, prompt_input, system, raw=False, variables=request.template_vars)
        )
    messages: list[Any] = list(prompt_input)
    if not messages or isinstance(messages[0], int):
        return messages
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": clean_argument(system, "--system")})
    if left_out := lost_calls_note(engine, messages):
        raise InvalidRequest(f"{left_out}: write into `content` what was called")
    if not request.template_vars and not request.hints:
        return messages
    return ChatPrompt(messages, request.template_vars, request.hints)
