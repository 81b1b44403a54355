"""What callers may give as a prompt, and its token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.request import Message

Prompt = str | Sequence[int] | Sequence[Message]
"""Plain text (encoded as it is), token ids, or chat messages (rendered with the model's chat template)."""

_PROMPT_KINDS = "a prompt is a text, a list of token ids or a list of messages"


def tokenize(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids. Raises InvalidRequest for what is none, or what the chat template cannot render."""
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError:
            prompt = prompt.encode("utf-8", "replace").decode("utf-8")
        bos = tokenizer.bos_token
        return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))
    listed = isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping))
    if not listed:
        raise InvalidRequest(_PROMPT_KINDS)
    items: list[Any] = list(prompt)
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [int(item) for item in items]
    if not all(isinstance(item, Mapping) for item in items):
        raise InvalidRequest(_PROMPT_KINDS)
    try:
        return list(tokenizer.apply_chat_template(items, add_generation_prompt=True))
    except CortexError:
        raise
    except Exception as error:
        raise InvalidRequest(f"the chat template cannot render these messages: {error}") from error
