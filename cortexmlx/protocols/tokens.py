"""Tokens and their log-probabilities, in the shape that each kind of body has for them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from cortexmlx.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.request import Completion

Record = dict[str, Any]
TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for."""

LEAST = -9999.0
"""What the OpenAI API writes for a token that is never written, whose log-probability is minus infinity."""


def name_of(data: bytes) -> str:
    """A token as text; one that is no whole character by its bytes, like `bytes:\\xe2\\x80`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def simple_tokens(told: Sequence[TokenLogprob | None], bytes_of: TokenBytes) -> list[Record | None]:
    """For simple records: each token by id and text, with the likeliest at its place."""

    def one(token: int, logprob: float) -> Record:
        return {"token_id": token, "token": name_of(bytes_of(token)), "logprob": logprob}

    return [None if t is None else {**one(t.token_id, t.logprob), "top": [one(*each) for each in t.top]} for t in told]


def chat_tokens(told: Sequence[TokenLogprob], bytes_of: TokenBytes) -> list[Record]:
    """For chat completions and responses: each token by text and bytes, with the likeliest at its place."""

    def one(token: int, logprob: float) -> Record:
        data = bytes_of(token)
        return {"token": name_of(data), "bytes": list(data), "logprob": max(logprob, LEAST)}

    return [{**one(t.token_id, t.logprob), "top_logprobs": [one(*each) for each in t.top]} for t in told]


def completion_tokens(
    answer: Completion, echoed: PromptLogprobs | None, text: str, bytes_of: TokenBytes
) -> Record | None:
    """For completions: parallel lists. The tokens of an echo come first, and the first of all has no log-probability.
    Where two of the likeliest have one text, the likelier one has the name.
    """
    if answer.logprobs is None:
        return None
    before: Sequence[TokenLogprob | None] = () if echoed is None else echoed
    every = (*before, *answer.logprobs)
    ids = [*(() if echoed is None else echoed.tokens), *(t.token_id for t in answer.logprobs)]
    pieces = [bytes_of(token) for token in ids]

    def likeliest(token: TokenLogprob) -> dict[str, float]:
        named = [(name_of(bytes_of(each)), max(logprob, LEAST)) for each, logprob in token.top]
        return dict(reversed(named))

    return {
        "text_offset": offsets(pieces, text),
        "tokens": [name_of(piece) for piece in pieces],
        "token_logprobs": [None if t is None else max(t.logprob, LEAST) for t in every],
        "top_logprobs": [None if t is None else likeliest(t) for t in every],
    }


def offsets(pieces: Sequence[bytes], text: str) -> list[int]:
    """The character of `text` at which each token begins. What a stop string cut off begins at its end; the space that
    a text's first token is marked with, and the text goes without, has no place.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    places, place = [], 0
    for piece in pieces:
        places.append(place)
        place += len(decoder.decode(piece))
    missing = int(bool(pieces) and pieces[0].startswith(b" ") and not text.startswith(" "))
    return [min(max(0, place - missing), len(text)) for place in places]
