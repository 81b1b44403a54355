"""Chat messages as a prompt, as the engine takes them. Without mlx or threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from cortexmlx.errors import InvalidRequest

if TYPE_CHECKING:
    from cortexmlx.structured.output import Thoughts
    from cortexmlx.types.request import Message

TemplateVars = Mapping[str, object]
"""Variables for the model's chat template, by name: booleans, numbers, texts, and lists and mappings of them."""

NO_VARIABLES: TemplateVars = MappingProxyType({})

THINKING = "enable_thinking"
"""The variable that switches thoughts on and off. A template that calls it `thinking` gets it under that name."""

EFFORT = "reasoning_effort"
"""The variable that says how much a model should think, in templates that have levels of it."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of message parts that are text."""


class PromptTokenizer(Protocol):
    """What a PromptMemory needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> Collection[int]:
        """The tokens that end an answer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for."""


class PromptMemory(Protocol):
    """Remembers the tokens that a model wrote in earlier turns, so that later prompts get them for the same text."""

    def tokens(
        self, reader: PromptTokenizer, text: str, render: Callable[[Sequence[Message]], str | list[int]]
    ) -> list[int]:
        """Return the tokens of the prompt `text`, remembered ones where the text agrees. `render` renders messages."""

    def anchor(self, thoughts: Thoughts | None) -> int:
        """Return how many tokens of the prompt the next turn's prompt will keep; 0 if unknown, or if it keeps all."""


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with variables for the model's chat template.

    `template_vars` are, for example, `{"enable_thinking": False}` or `{"reasoning_effort": "low"}`. A variable that the
    template does not read raises InvalidRequest when the prompt is rendered.
    """

    messages: Sequence[Message]
    template_vars: TemplateVars = field(default_factory=dict)
    hints: TemplateVars = field(default_factory=dict)
    """Variables for templates that read them, on top of `template_vars`. Other templates do not get them."""
    memory: PromptMemory | None = field(default=None, repr=False)
    """What is remembered of earlier answers, for servers; None: nothing."""


def checked_vars(variables: object) -> dict[str, object]:
    """Return a copy of the template's variables. Raises InvalidRequest unless they are a mapping with names as keys."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequest(f"template_vars is {variables!r:.80}, but must be a map from names to values")
    return dict(variables)


def plain_message(
    message: Mapping[str, object], write_image: Callable[[Mapping[str, Any]], str] | None = None
) -> dict[str, object]:
    """Return the message with its content as one text. In the OpenAI API, `content` may be a list of parts.
    `write_image(part)` returns what stands for an image in the text; it is None if the model sees no images.

    Raises InvalidRequest for any other part: a template would write a placeholder for it, and the model would
    answer as if it had seen something.
    """
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": "".join(_part_text(part, index, write_image) for index, part in enumerate(content))}


def wrap_in_tag(tag: str, text: str) -> str:
    """Return a text between an opening and a closing tag, which mark its origin within another message."""
    return f"<{tag}>\n{text}\n</{tag}>"


def suggest_name(name: str, known_names: Collection[str]) -> str:
    """Return " (did you mean ...?)" with the known name nearest to `name`, or "" if none is near."""
    from difflib import get_close_matches

    matches = get_close_matches(name, known_names, n=1, cutoff=0.7)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_role(role: str) -> None:
    """Raise InvalidRequest if a role is nearly one of the usual ones. Any other may be known to a chat template."""
    if role not in _ROLES and (meant := suggest_name(role, _ROLES)):
        raise InvalidRequest(f"`role` is {role!r:.40}{meant}", field="role")


def _part_text(part: object, index: int, write_image: Callable[[Mapping[str, Any]], str] | None = None) -> str:
    """Return the text of a part of a message's content; `write_image` makes an image's. Raises InvalidRequest."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if write_image is not None and isinstance(part, Mapping) and kind in ("image", "image_url"):
        return write_image(part)
    if kind in _TEXT_PARTS:
        if isinstance(text, str):
            return text
        raise InvalidRequest(
            f"a message's `content` has a part of type {kind!r:.80} whose `text` is no text.",
            field=f"content[{index}].text",
        )
    raise InvalidRequest(
        f"a message's `content` has a part of type {kind!r:.80}, but only text is read: images need a model that sees "
        "them, sound and files are never read. Leave it out.",
        field=f"content[{index}]",
    )
