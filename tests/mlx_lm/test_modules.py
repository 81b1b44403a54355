"""Replacing a function in the modules that have imported it, on modules of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from cortexmlx.mlx_lm.modules import PACKAGE, replace_function

Function = Callable[[int], int]


def double(x: int) -> int:
    return 2 * x


def named_alike(x: int) -> int:
    return -x


def one_more(original: Any) -> Function:
    def replaced(x: int) -> int:
        return int(original(x)) + 1

    return replaced


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Function], ModuleType]:
    """Puts a module with a function `f` where imports find it."""

    def module(name: str, function: Function) -> ModuleType:
        made = ModuleType(name)
        made.f = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return module


def test_whoever_imported_the_function_has_the_replacement_and_nobody_else(put: Any) -> None:
    home, model = put(f"{PACKAGE}test_home", double), put(f"{PACKAGE}test_model", double)
    other, outside = put(f"{PACKAGE}test_other", named_alike), put("test_outside", double)
    replace_function("test_home", "f", one_more)
    assert [m.f(5) for m in (home, model, other, outside)] == [11, 11, -5, 10]
    assert home.f is model.f and home.f.replaced is double


def test_again_reaches_modules_that_came_later_and_wraps_nothing_twice(put: Any) -> None:
    home = put(f"{PACKAGE}test_home", double)
    replace_function("test_home", "f", one_more)
    first, late = home.f, put(f"{PACKAGE}test_late", double)
    made: list[Any] = []
    replace_function("test_home", "f", lambda original: made.append(original))
    assert home.f is late.f is first and home.f(5) == 11 and made == []


def test_a_function_that_is_not_there_is_an_error(put: Any) -> None:
    put(f"{PACKAGE}test_home", double)
    with pytest.raises(AttributeError):
        replace_function("test_home", "g", one_more)
