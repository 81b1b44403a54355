"""Check the arguments of an app's calls, and name the wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TypeGuard, TypeVar

from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import MemoryPressure

T = TypeVar("T")

MOST_CHARACTERS = 1024
"""Characters of a client's name. The name is hashed for each of its requests, on the engine's thread."""


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether a value is a list or another iterable of items: not bytes, a mapping or an array without axes."""
    array_of_one = getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, Mapping)) and not array_of_one


def checked_text(name: str, text: str | None, most: int | None = None) -> str | None:
    """Return a text as a plain `str`, since a subclass could compare, hash or measure differently. Raises
    InvalidRequest unless it is a text or None, and for more than `most` characters.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {text!r:.80}, but must be a text or None")
    text = str.__str__(text)
    if most is not None and len(text) > most:
        raise InvalidRequest(f"{name} has {len(text):,} characters, but must have at most {most:,}")
    return text


def checked_client(client: str | None) -> str | None:
    """Return the name of a client. Raises InvalidRequest if it is not a text."""
    return checked_text("client", client, MOST_CHARACTERS)


def checked_adapter(adapter: str | None) -> str | None:
    """Return the name of an adapter. Raises InvalidRequest if it is not a text."""
    return checked_text("adapter", adapter, MOST_CHARACTERS)


def is_name(value: object) -> bool:
    """Return whether an adapter can have this name."""
    return isinstance(value, str) and 0 < len(value) <= MOST_CHARACTERS


def checked_function(name: str, function: T) -> T:
    """Return a function, or None. Raises InvalidRequest for anything else."""
    if function is not None and not callable(function):
        raise InvalidRequest(f"{name} is {function!r:.80}, but must be a function or None")
    return function


def checked_tokens(tokens: Iterable[int], vocab_size: int) -> list[int]:
    """Return token ids as plain integers. Raises InvalidRequest for anything that is no token of the model."""
    if not is_list(tokens):
        raise InvalidRequest(f"tokens are a list of token ids, not {tokens!r:.80}")
    ids: list[int] = []
    for token in tokens:
        if not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token!r} is outside the vocabulary of {vocab_size} tokens")
        ids.append(int(token))
    return ids


def checked_token(token: int) -> int:
    """Return a token id as a plain integer. Raises InvalidRequest for anything else."""
    if not isinstance(token, Integral):
        raise InvalidRequest(f"a token id is an integer, not {token!r:.80}")
    return int(token)


def checked_pressure(level: MemoryPressure | str) -> MemoryPressure:
    """Return the level with this name. Raises InvalidRequest for other names."""
    try:
        return MemoryPressure(level)
    except ValueError:
        raise InvalidRequest(f'level is {level!r}, but must be "warning" or "critical"') from None
