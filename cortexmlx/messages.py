"""Chat messages as a prompt. No mlx, no threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cortexmlx.errors import InvalidRequest
from cortexmlx.request import Message

TemplateVars = Mapping[str, object]
"""Variables for the model's chat template, by name: booleans, numbers, texts, and lists and maps of them."""

NO_VARIABLES: TemplateVars = MappingProxyType({})

THINKING = "enable_thinking"
"""The variable that switches thoughts on and off. A template that calls it `thinking` gets it under that name."""

EFFORT = "reasoning_effort"
"""The variable that says how much a model is to think, where a template has degrees of it."""


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with variables for the model's chat template, in the place of the messages alone.

    `template_vars` such as `{"enable_thinking": False}` or `{"reasoning_effort": "low"}`; one that the template does
    not read raises InvalidRequest when the prompt is rendered.
    """

    messages: Sequence[Message]
    template_vars: TemplateVars = field(default_factory=dict)


def body_vars(body: Mapping[str, object]) -> dict[str, object]:
    """The template's variables that the body of a request asks for: vLLM's `chat_template_kwargs` and OpenAI's
    `reasoning_effort`, over which the former go; null asks for nothing. Raises InvalidRequest for what is none.
    """
    effort, variables = body.get(EFFORT), body.get("chat_template_kwargs") or {}
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(f"{EFFORT} is {effort!r:.80}, but must be a text like 'low'")
    if not isinstance(variables, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is {variables!r:.80}, but must be an object")
    return ({} if effort is None else {EFFORT: effort}) | {k: v for k, v in variables.items() if v is not None}


def checked_vars(variables: object) -> dict[str, object]:
    """A copy of the template's variables. Raises InvalidRequest for what is no map from names."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequest(f"template_vars is {variables!r:.80}, but must be a map from names to values")
    return dict(variables)
