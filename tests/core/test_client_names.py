"""A client's name is a plain text: a subclass of `str` brings no code of its own onto the engine's thread."""

from __future__ import annotations

import pytest

from cortexmlx.core.arguments import MAX_NAME_CHARACTERS, checked_client
from cortexmlx.errors import InvalidRequest


class Hostile(str):
    """A text that claims to be every other text, and to be short."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    def __str__(self) -> str:
        return "somebody else"


def test_the_name_of_a_client_is_a_plain_text() -> None:
    name = checked_client(Hostile("a"))
    assert type(name) is str
    assert name == "a"


def test_a_name_that_says_it_is_short_is_measured() -> None:
    with pytest.raises(InvalidRequest, match="client has 1,025 characters"):
        checked_client(Hostile("x" * (MAX_NAME_CHARACTERS + 1)))
