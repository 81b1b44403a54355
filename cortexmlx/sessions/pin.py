"""Pin: a prefix of prompts that stays in the prefix cache, given as text, tokens or messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from cortexmlx.core.arguments import is_list
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.prompt import ChatTokenizer, Prompt, render, template_variables, tokenize
from cortexmlx.core.worker import Submission, Worker
from cortexmlx.errors import EngineClosed, InvalidRequest
from cortexmlx.kv.prefix import common_prefix_length
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.messages import NO_VARIABLES, ChatPrompt, TemplateVars
from cortexmlx.types.request import Message


class Pin:
    """A prefix of prompts that `Engine.pin` keeps cached: `tokens` tokens, in whole blocks. It lasts until `unpin`,
    the end of a `with`, or the end of the engine, also if the object is dropped.
    """

    def __init__(self, tokens: int, remove: Callable[[], None]) -> None:
        self.tokens = tokens
        self._remove: Callable[[], None] | None = remove

    def __repr__(self) -> str:
        return f"<Pin: {self.tokens} tokens>"

    def unpin(self) -> None:
        """Let the blocks be evicted like all others. Safe to call again, and after the engine is closed."""
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


def pin_prompt(worker: Worker, submission: Submission) -> Pin:
    """Pin the prompt of a submission, compute it and return its Pin. Raises PinRefused, InvalidRequest if there is no
    whole block to pin, and whatever ends the submission's request.
    """
    request = submission.request
    number, count = worker.ask(lambda core: core.pin(request.prompt, request.client, request.adapter))
    pin = Pin(count, lambda: worker.ask(lambda core: core.pins.remove(number)))
    handles: list[RequestHandle] = []
    try:
        worker.submit([replace(submission, request=replace(request, prompt=request.prompt[: count + 1]))], handles)
        handles[0].result()
        worker.ask(lambda core: core.pins.pin_state(number))
    except BaseException:
        pin.unpin()
        raise
    return pin


def prefix_tokens(tokenizer: SharedTokenizer, prefix: Prompt) -> list[int]:
    """Return the tokens that every prompt with this prefix begins with. Raises InvalidRequest."""
    if isinstance(prefix, str):
        return tokenize(tokenizer, prefix)
    if isinstance(prefix, ChatPrompt):
        return chat_prefix_tokens(tokenizer, prefix.messages, template_variables(tokenizer, prefix))
    if not is_list(prefix):
        return tokenize(tokenizer, prefix)
    items: list[Any] = list(prefix)
    if items and all(isinstance(item, Mapping) for item in items):
        return chat_prefix_tokens(tokenizer, items)
    return tokenize(tokenizer, items)


def chat_prefix_tokens(
    reader: ChatTokenizer, messages: Sequence[Message], variables: TemplateVars = NO_VARIABLES
) -> list[int]:
    """Return the tokens that every prompt continuing `messages` begins with, found by comparing two such prompts.

    These are not the tokens of the messages alone: a template writes more after the last message, and if it opens an
    answer there, other messages would not continue it. Raises InvalidRequest if the template can render no
    continuation.
    """
    roles = ("assistant", "user") if messages[-1].get("role") == "user" else ("user", "assistant")
    try:
        first_prompt, second_prompt = _two_continuations(reader, messages, variables, roles[0])
    except InvalidRequest:
        first_prompt, second_prompt = _two_continuations(reader, messages, variables, roles[1])
    tokens = first_prompt[: common_prefix_length(first_prompt, second_prompt)]
    if min(tokens, default=0) < 0:
        raise InvalidRequest("a prefix with images cannot be pinned: pin a text, and show images after it")
    return tokens


def _two_continuations(
    reader: ChatTokenizer, messages: Sequence[Message], variables: TemplateVars, role: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of two prompts that continue the messages with different letters."""
    first_prompt, second_prompt = (
        render(reader, [*messages, {"role": role, "content": letter}], variables) for letter in "ab"
    )
    return _encode_rendered(reader, first_prompt), _encode_rendered(reader, second_prompt)


def _encode_rendered(reader: ChatTokenizer, rendered_prompt: str | list[int]) -> list[int]:
    """Return the tokens of rendered messages, which a template may have returned as tokens already."""
    return reader.encode(rendered_prompt, False) if isinstance(rendered_prompt, str) else rendered_prompt
