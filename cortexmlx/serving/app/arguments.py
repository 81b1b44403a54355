"""Arguments of an app's calls that are of the wrong type, refused by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeGuard, TypeVar

from cortexmlx.errors import InvalidRequest

T = TypeVar("T")

MOST_CHARACTERS = 1024
"""Characters of a client's name. It is hashed for each of its requests, on the engine's thread."""


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """It is a list of things, or another iterable: not bytes, a map or an array without axes."""
    array_of_one = getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, Mapping)) and not array_of_one


def checked_text(name: str, text: str | None, most: int | None = None) -> str | None:
    """The same text, as a plain `str`: a subclass may compare, hash and measure as it likes. Raises InvalidRequest for
    what is neither a text nor None, and for more than `most` characters.
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
    """The same name of a client. Raises InvalidRequest for what is none."""
    return checked_text("client", client, MOST_CHARACTERS)


def checked_function(name: str, function: T) -> T:
    """The same function. Raises InvalidRequest for what is neither a function nor None."""
    if function is not None and not callable(function):
        raise InvalidRequest(f"{name} is {function!r:.80}, but must be a function or None")
    return function
