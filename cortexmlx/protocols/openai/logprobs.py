"""Tokens and their log-probabilities, in the shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from cortexmlx.protocols.request import Body, TokenBytes
from cortexmlx.types.logprobs import TokenLogprob

MIN_LOGPROB = -9999.0
"""The OpenAI API's number for minus infinity: the log-probability of a token that is never written."""


def token_name(data: bytes) -> str:
    """Return a token as text. A token that is not valid UTF-8 is written as `bytes:` and its bytes in hexadecimal."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(logprobs: Iterable[TokenLogprob], token_bytes: TokenBytes) -> list[Body]:
    """Return log-probabilities as chat completions and responses have them, each with text, bytes, `top_logprobs`."""

    def entry_of(token: int, logprob: float) -> Body:
        data = token_bytes(token)
        return {"token": token_name(data), "bytes": list(data), "logprob": max(logprob, MIN_LOGPROB)}

    return [{**entry_of(t.token_id, t.logprob), "top_logprobs": [entry_of(*each) for each in t.top]} for t in logprobs]


def id_logprobs(logprobs: Iterable[TokenLogprob | None], token_bytes: TokenBytes) -> list[Body | None]:
    """Return log-probabilities, each with its token's id and text and the likeliest tokens, for fields of our own."""

    def entry_of(token: int, logprob: float) -> Body:
        return {"token_id": token, "token": token_name(token_bytes(token)), "logprob": logprob}

    return [
        None if t is None else {**entry_of(t.token_id, t.logprob), "top": [entry_of(*each) for each in t.top]}
        for t in logprobs
    ]


class _PendingToken(NamedTuple):
    """A token whose log-probability is not written yet. `offset` is the character at which it begins."""

    offset: int
    name: str
    logprob: TokenLogprob | None


class CompletionLogprobs:
    """Builds the `logprobs` of a `/v1/completions` choice: parallel lists that grow with tokens and text.

    `text_offset` is the character at which a token begins. A token that a stop string cuts off begins at the end of the
    text. So a token waits until the text has reached it. Some tokenizers mark a text's first token with a space that
    the text does not have. This space does not count in offsets.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending_tokens: list[_PendingToken] = []
        self._next_offset = 0
        self._length = 0
        self._starts_with_space: bool | None = None  # the first token begins with a space
        self._space_stripped = True  # the text begins without one

    def add_tokens(self, ids: Iterable[int], logprobs: Iterable[TokenLogprob | None]) -> None:
        """Add tokens with their log-probabilities. The first token of a prompt has None."""
        for token, logprob in zip(ids, logprobs, strict=True):
            data = self._token_bytes(token)
            if self._starts_with_space is None:
                self._starts_with_space = data.startswith(b" ")
            self._pending_tokens.append(_PendingToken(self._next_offset, token_name(data), logprob))
            self._next_offset += len(self._decoder.decode(data))

    def add_text(self, text: str) -> None:
        """Add a piece of the choice's text."""
        if text and not self._length:
            self._space_stripped = not text.startswith(" ")
        self._length += len(text)

    def pop_lists(self, *, is_complete: bool) -> Body:
        """Return the lists for the tokens that the text has reached, or for all pending tokens if the text
        `is_complete`. Each token is returned once. If two of the likeliest tokens have the same name, the likelier one
        is listed.
        """
        dropped_spaces = int(bool(self._starts_with_space) and self._space_stripped)
        reached_offset = self._length + dropped_spaces if self._length else 0
        ready_tokens = [token for token in self._pending_tokens if is_complete or token.offset <= reached_offset]
        del self._pending_tokens[: len(ready_tokens)]
        return {
            "text_offset": [min(max(0, token.offset - dropped_spaces), self._length) for token in ready_tokens],
            "tokens": [token.name for token in ready_tokens],
            "token_logprobs": [
                None if token.logprob is None else max(token.logprob.logprob, MIN_LOGPROB) for token in ready_tokens
            ],
            "top_logprobs": [
                None if token.logprob is None else self._top_logprobs(token.logprob) for token in ready_tokens
            ],
        }

    def _top_logprobs(self, token: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens at a token's place, by name, with their log-probabilities."""
        named_logprobs = [
            (token_name(self._token_bytes(each)), max(logprob, MIN_LOGPROB)) for each, logprob in token.top
        ]
        return dict(reversed(named_logprobs))
