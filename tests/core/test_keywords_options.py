"""The constructor that has the options of a configuration."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.core.arguments import takes_options_of
from cortexmlx.core.config import EngineConfig


@dataclass
class Config:
    name: str
    _: KW_ONLY
    size: int = 3


class Thing:
    @takes_options_of(Config)
    def __init__(self, *given: Any, **options: Any) -> None:
        self.config = Config(*given, **options)


def test_a_constructor_shows_the_options_of_its_configuration() -> None:
    assert str(inspect.signature(Thing)) == "(name: 'str', *, size: 'int' = 3) -> None"
    assert [*inspect.signature(Thing.__init__).parameters] == ["self", "name", "size"]


def test_it_is_given_them() -> None:
    assert Thing("a", size=5).config == Config("a", size=5)
    with pytest.raises(TypeError, match=r"no option 'sise' \(did you mean 'size'\?\): see help\(Thing\)$"):
        Thing("a", sise=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Thing("a", 5)  # type: ignore[misc]


def test_an_engine_names_the_option_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"no option 'max_row' \(did you mean 'max_rows'\?\): see help\(Engine\)$"):
        Engine("smollm2", max_row=3)  # type: ignore[call-arg]


def test_an_engine_has_the_options_of_its_configuration() -> None:
    engine, config = inspect.signature(Engine).parameters, inspect.signature(EngineConfig).parameters
    assert list(engine.values()) == list(config.values()) and len(engine) > 15
    assert all(p.kind is p.KEYWORD_ONLY for name, p in engine.items() if name != "model")


def test_every_option_says_what_it_means() -> None:
    """Each field is followed by a text."""
    lines = [line.strip() for line in inspect.getsource(EngineConfig).splitlines()]
    for name in inspect.signature(EngineConfig).parameters:
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"{name}: "))
        assert lines[at + 1].startswith('"""'), name
