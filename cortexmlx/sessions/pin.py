"""Pin: a beginning of prompts that stays cached, given as text, tokens or messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from cortexmlx.errors import EngineClosed, InvalidRequest
from cortexmlx.kv.prefix import common_length
from cortexmlx.messages import NO_VARIABLES, ChatPrompt, TemplateVars
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.request import Message
from cortexmlx.serving.app.arguments import is_list
from cortexmlx.serving.prompt import Prompt, Reader, render, tokenize


class Pin:
    """What prompts begin with, kept by `Engine.pin`: `tokens` of it, in whole blocks, until `unpin`, the end of a
    `with`, or the end of the engine. Dropping it keeps it.
    """

    def __init__(self, tokens: int, remove: Callable[[], None]) -> None:
        self.tokens = tokens
        self._remove: Callable[[], None] | None = remove

    def __repr__(self) -> str:
        return f"<Pin: {self.tokens} tokens>"

    def unpin(self) -> None:
        """Let it be evicted like everything else. Safe to call again, and when the engine is closed."""
        remove, self._remove = self._remove, None
        if remove is not None:
            with suppress(EngineClosed):
                remove()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpin()


def beginning(tokenizer: SharedTokenizer, prefix: Prompt) -> list[int]:
    """The tokens that prompts have which begin with `prefix`. Raises InvalidRequest."""
    if isinstance(prefix, str):
        return tokenize(tokenizer, prefix)
    if isinstance(prefix, ChatPrompt):
        return shared_beginning(tokenizer, prefix.messages, prefix.template_vars)
    if not is_list(prefix):
        return tokenize(tokenizer, prefix)
    items: list[Any] = list(prefix)
    if items and all(isinstance(item, Mapping) for item in items):
        return shared_beginning(tokenizer, items)
    return tokenize(tokenizer, items)


def shared_beginning(reader: Reader, messages: Sequence[Message], variables: TemplateVars = NO_VARIABLES) -> list[int]:
    """The tokens of every prompt that goes on after `messages`, found by two that do.

    Not those of the messages alone: a template puts more behind the last one, and where it opens an answer at once,
    what comes next would not begin so. Raises InvalidRequest if the template renders none that goes on.
    """
    roles = ("assistant", "user") if messages[-1].get("role") == "user" else ("user", "assistant")
    try:
        one, other = _two(reader, messages, variables, roles[0])
    except InvalidRequest:
        one, other = _two(reader, messages, variables, roles[1])
    return one[: common_length(one, other)]


def _two(
    reader: Reader, messages: Sequence[Message], variables: TemplateVars, role: str
) -> tuple[list[int], list[int]]:
    """The prompts that go on with one letter and with another."""
    one, other = (render(reader, [*messages, {"role": role, "content": letter}], variables) for letter in "ab")
    return _ids(reader, one), _ids(reader, other)


def _ids(reader: Reader, rendered: str | list[int]) -> list[int]:
    return reader.encode(rendered, False) if isinstance(rendered, str) else rendered
