"""Tokens and their log-probabilities, in the shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from cortexmlx.protocols.request import Body, TokenBytes
from cortexmlx.types.logprobs import TokenLogprob

LEAST = -9999.0
"""The OpenAI API's number for minus infinity: the log-probability of a token that is never written."""


def token_name(data: bytes) -> str:
    """Return a token as text. A token that is not valid UTF-8 is named by its bytes, like `bytes:\\xe2\\x80`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(told: Iterable[TokenLogprob], token_bytes: TokenBytes) -> list[Body]:
    """Return each token by text and bytes, with the likeliest tokens at its place: for chat completions and
    responses.
    """

    def one(token: int, logprob: float) -> Body:
        data = token_bytes(token)
        return {"token": token_name(data), "bytes": list(data), "logprob": max(logprob, LEAST)}

    return [{**one(t.token_id, t.logprob), "top_logprobs": [one(*each) for each in t.top]} for t in told]


def id_logprobs(told: Iterable[TokenLogprob | None], token_bytes: TokenBytes) -> list[Body | None]:
    """Return each token by id and text, with the likeliest tokens at its place: for fields that the OpenAI API does not
    have.
    """

    def one(token: int, logprob: float) -> Body:
        return {"token_id": token, "token": token_name(token_bytes(token)), "logprob": logprob}

    return [None if t is None else {**one(t.token_id, t.logprob), "top": [one(*each) for each in t.top]} for t in told]


class _Token(NamedTuple):
    place: int
    name: str
    told: TokenLogprob | None


class CompletionLogprobs:
    """The `logprobs` of a choice of completions: parallel lists that grow with tokens and text.

    `text_offset` is the character at which a token begins. A token that a stop string cuts off begins at the end of the
    text. So a token waits until the text has reached it. Some tokenizers mark a text's first token with a space that
    the text does not have. This space does not count in offsets.
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
        """Add tokens with their log-probabilities. The first token of a prompt has None."""
        for token, logprob in zip(ids, told, strict=True):
            data = self._token_bytes(token)
            if self._marked is None:
                self._marked = data.startswith(b" ")
            self._waiting.append(_Token(self._next, token_name(data), logprob))
            self._next += len(self._decoder.decode(data))

    def add_text(self, text: str) -> None:
        """Add a piece of the choice's text."""
        if text and not self._length:
            self._stripped = not text.startswith(" ")
        self._length += len(text)

    def take(self, *, whole: bool) -> Body:
        """Return the lists of the tokens that the text has reached, or of all waiting tokens if the text is `whole`.
        Each token is returned once. If two of the likeliest tokens have the same name, the likelier one is listed.
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
