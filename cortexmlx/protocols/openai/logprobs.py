"""Tokens and their log-probabilities, in the shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from cortexmlx.logprobs import TokenLogprob
from cortexmlx.protocols.reply import Body, TokenBytes

LEAST = -9999.0
"""What the OpenAI API writes for minus infinity, the log-probability of a token that is never written."""


def token_name(data: bytes) -> str:
    """A token as text; one that is no whole character by its bytes, like `bytes:\\xe2\\x80`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(told: Iterable[TokenLogprob], token_bytes: TokenBytes) -> list[Body]:
    """For chat completions and responses: each token by text and bytes, with the likeliest at its place."""

    def one(token: int, logprob: float) -> Body:
        data = token_bytes(token)
        return {"token": token_name(data), "bytes": list(data), "logprob": max(logprob, LEAST)}

    return [{**one(t.token_id, t.logprob), "top_logprobs": [one(*each) for each in t.top]} for t in told]


def id_logprobs(told: Iterable[TokenLogprob | None], token_bytes: TokenBytes) -> list[Body | None]:
    """For what the OpenAI API has no shape for: each token by id and text, with the likeliest at its place."""

    def one(token: int, logprob: float) -> Body:
        return {"token_id": token, "token": token_name(token_bytes(token)), "logprob": logprob}

    return [None if t is None else {**one(t.token_id, t.logprob), "top": [one(*each) for each in t.top]} for t in told]


class _Token(NamedTuple):
    place: int
    name: str
    told: TokenLogprob | None


class CompletionLogprobs:
    """The `logprobs` of a choice of completions: parallel lists, made while tokens and text arrive.

    `text_offset` is the character at which a token begins. What a stop string cuts off begins at the end of the text,
    so a token waits until the text has reached it. The space that marks a text's first token, and that the text goes
    without, has no place.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[_Token] = []
        self._next = 0
        self._length = 0
        self._marked: bool | None = None  # the first token begins with a space
        self._stripped = True  # the text begins without one

    def add_tokens(self, ids: Iterable[int], told: Iterable[TokenLogprob | None]) -> None:
        """Take tokens with their log-probabilities. The first token of a prompt has None."""
        for token, logprob in zip(ids, told, strict=True):
            data = self._token_bytes(token)
            if self._marked is None:
                self._marked = data.startswith(b" ")
            self._waiting.append(_Token(self._next, token_name(data), logprob))
            self._next += len(self._decoder.decode(data))

    def add_text(self, text: str) -> None:
        """Take a piece of the choice's text."""
        if text and not self._length:
            self._stripped = not text.startswith(" ")
        self._length += len(text)

    def take(self, *, whole: bool) -> Body:
        """The lists of the tokens that the text has reached, each token once; of all tokens if the text is `whole`.
        Where two of the likeliest tokens have one name, the likelier one has it.
        """
        missing = int(bool(self._marked) and self._stripped)
        reached = self._length + missing if self._length else 0
        ready = [token for token in self._waiting if whole or token.place <= reached]
        del self._waiting[: len(ready)]
        return {
            "text_offset": [min(max(0, token.place - missing), self._length) for token in ready],
            "tokens": [token.name for token in ready],
            "token_logprobs": [None if token.told is None else max(token.told.logprob, LEAST) for token in ready],
            "top_logprobs": [None if token.told is None else self._likeliest(token.told) for token in ready],
        }

    def _likeliest(self, token: TokenLogprob) -> dict[str, float]:
        named = [(token_name(self._token_bytes(each)), max(logprob, LEAST)) for each, logprob in token.top]
        return dict(reversed(named))
