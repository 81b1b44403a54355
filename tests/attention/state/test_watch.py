"""While a model is watched, its running modules are known; afterwards its classes are as they were."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from cortexmlx.attention.recurrent import track_running_modules


class Inner(nn.Module):  # type: ignore[misc]
    seen: list[str]
    watched: list[nn.Module]

    def __call__(self, x: mx.array, *, fail: bool = False) -> mx.array:
        type(self).seen = [type(module).__name__ for module in type(self).watched]
        if fail:
            raise ZeroDivisionError
        return x


class Heir(Inner):
    """Has no method of its own."""


class Outer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.parts = [Inner(), Heir()]

    def __call__(self, x: mx.array, which: int, fail: bool = False) -> mx.array:
        out: mx.array = self.parts[which](x, fail=fail)
        return out


def test_the_innermost_module_is_the_last() -> None:
    model, before = Outer(), Inner.__call__
    with track_running_modules(model) as Inner.watched:
        model(mx.zeros(1), 0)
        assert (Inner.seen, Inner.watched) == (["Outer", "Inner"], [])
        model(mx.zeros(1), 1)
        assert (Heir.seen[0], Heir.seen[-1]) == ("Outer", "Heir")
    assert Inner.__call__ is before and "__call__" not in Heir.__dict__
    model(mx.zeros(1), 0)
    assert Inner.seen == []


def test_what_fails_is_running_no_more() -> None:
    model: Any = Outer()
    before = Outer.__call__
    with pytest.raises(ZeroDivisionError), track_running_modules(model) as Inner.watched:
        model(mx.zeros(1), 0, fail=True)
    assert Inner.watched == [] and Outer.__call__ is before


def test_what_runs_on_another_thread_is_not_known() -> None:
    model = Outer()
    with track_running_modules(model) as Inner.watched:
        other = threading.Thread(target=model, args=(mx.zeros(1), 0))
        other.start()
        other.join()
        assert Inner.seen == []
        model(mx.zeros(1), 0)
        assert Inner.seen == ["Outer", "Inner"]


def test_a_second_watch_waits_for_the_first() -> None:
    """Else each would leave the other's methods behind."""
    before, order = Outer.__call__, []

    def second() -> None:
        with track_running_modules(Outer()):
            order.append("second")

    with track_running_modules(Outer()):
        other = threading.Thread(target=second)
        other.start()
        other.join(0.05)
        order.append("first")
    other.join()
    assert order == ["first", "second"] and Outer.__call__ is before
