"""The fields that each kind of body may have: those served, those of no effect here, and those refused by name.

Nothing else is accepted: a field that is not known may be a misspelt one, and an answer without it would be an answer
to another question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import meant
from cortexmlx.protocols.request import Style
from cortexmlx.request import SamplingParams

_MOST_NAMED = 10

SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processors"}
"""The parameters that a line may set, under their own names."""

ALIASES = {"temp": "temperature", "max_completion_tokens": "max_tokens"}
"""Other names of parameters; where both are given, `max_completion_tokens` wins, as in the OpenAI API."""

NO_EFFECT = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""What a body may say and what changes no answer: the model is the one of the command line, nothing is kept, every
prefix is cached, and there are no tools to call in parallel.
"""


@dataclass(frozen=True)
class Unserved:
    """A field that would change the answer. `harmless` are the values that ask for what happens anyway."""

    why: str
    harmless: tuple[Any, ...] = ()


_TOOLS = "the model is offered no tools"
_FORM = "an answer is text and cannot be held to a form"
_PLAIN = {"format": {"type": "text"}}
_USUAL = {"verbosity": "medium"}
_WHOLE = "the answers of a batch are whole"
_STATELESS = "nothing is remembered of other requests: send all messages"

UNSERVED = {
    "tools": Unserved(_TOOLS, ([],)),
    "functions": Unserved(_TOOLS, ([],)),
    "tool_choice": Unserved(_TOOLS, ("none", "auto")),
    "function_call": Unserved(_TOOLS, ("none", "auto")),
    "max_tool_calls": Unserved(_TOOLS),
    "response_format": Unserved(_FORM, ({"type": "text"},)),
    "text": Unserved(_FORM, ({}, _PLAIN, _USUAL, _PLAIN | _USUAL)),
    "stream": Unserved(_WHOLE, (False,)),
    "stream_options": Unserved(_WHOLE),
    "background": Unserved(_WHOLE, (False,)),
    "background_options": Unserved(_WHOLE),
    "modalities": Unserved("the model writes text only", (["text"],)),
    "audio": Unserved("the model writes text only"),
    "image": Unserved("the model writes text only"),
    "web_search_options": Unserved("nothing is searched"),
    "moderation": Unserved("nothing is moderated"),
    "verbosity": Unserved("a model's answers have the length that they have", ("medium",)),
    "suffix": Unserved("a text is continued at its end only", ("",)),
    "previous_response_id": Unserved(_STATELESS),
    "conversation": Unserved(_STATELESS),
    "prompt": Unserved("there are no prompts that are kept elsewhere"),
    "context_management": Unserved(_STATELESS, ([],)),
    "truncation": Unserved("a prompt that does not fit is an error", ("disabled",)),
    "logits_processors": Unserved("they are functions, which a file cannot hold", ([],)),
}
"""Every field of these bodies that is not served, whichever of them has it."""

_OF_RESPONSES = frozenset(
    {
        "background",
        "background_options",
        "context_management",
        "conversation",
        "image",
        "max_tool_calls",
        "previous_response_id",
        "prompt",
        "text",
        "truncation",
    }
)
"""Those that responses alone have; elsewhere they are not known."""

_TEMPLATE = {"chat_template_kwargs", "reasoning_effort"}
"""What goes to the chat template; a prompt that does not go through it is refused with the reason."""

_EVERY = SAMPLING | ALIASES.keys() | _TEMPLATE
_ONE_ANSWER = SAMPLING - {"n", "best_of", "logprobs", "prompt_logprobs", "max_tokens"}
SERVED: Mapping[Style, frozenset[str]] = {
    Style.CHAT: _EVERY | {"messages", "top_logprobs"},
    Style.COMPLETIONS: _EVERY | {"prompt", "echo"},
    Style.RESPONSES: _ONE_ANSWER
    | _TEMPLATE
    | {"input", "instructions", "max_output_tokens", "top_logprobs", "include", "reasoning"},
    Style.SIMPLE: _EVERY | {"id", "custom_id", "prompt", "messages"},
}


def given(body: Mapping[str, Any], style: Style) -> dict[str, Any]:
    """What a body says: its fields without those that are null, which is what a missing one means, and without those
    of no effect. Raises InvalidRequest for the first that is not served, and for all that are not known.
    """
    said = {name: value for name, value in body.items() if value is not None}
    served = SERVED[style]
    refused = UNSERVED.keys() - served - (frozenset() if style is Style.RESPONSES else _OF_RESPONSES)
    for name in sorted(said.keys() & refused):
        _refuse(name, said.pop(name))
    if style is Style.RESPONSES and "metadata" in said:
        _check_metadata(said["metadata"])
    for name in NO_EFFECT:
        said.pop(name, None)
    check_fields(said, served, f"a {style.value} body" if style is not Style.SIMPLE else "a request")
    return said


def _refuse(name: str, value: Any) -> None:
    unserved = UNSERVED[name]
    if not any(type(value) is type(harmless) and value == harmless for harmless in unserved.harmless):
        raise InvalidRequest(f"{name!r} is not served: {unserved.why}")


def _check_metadata(metadata: Any) -> None:
    """A response repeats its metadata, so they must be what the type of a response can hold."""
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidRequest(f"metadata is {metadata!r:.80}, but must be an object whose values are texts")


def check_fields(names: Collection[str], known: Collection[str], what: str) -> None:
    """Raise InvalidRequest if there are fields that `what` does not have, with the names that they may stand for."""
    strange = [name for name in names if name not in known]
    if strange:
        shown = ", ".join(repr(name) + meant(name, known) for name in strange[:_MOST_NAMED])
        if len(strange) > _MOST_NAMED:
            shown += f" and {len(strange) - _MOST_NAMED} more"
        raise InvalidRequest(f"unknown field{'s' * (len(strange) > 1)} of {what}: {shown}")
