"""A thread with a large stack."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cortexmlx.structured import compiler as deep_stack
from cortexmlx.structured.compiler import STACK_BYTES, on_deep_stack


def test_it_runs_elsewhere_and_the_size_is_that_thread_s_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        start(thread)

    before = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", noted)
    assert on_deep_stack(threading.get_ident) != threading.get_ident()
    assert (sizes, threading.stack_size()) == ([STACK_BYTES], before)


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        on_deep_stack(fail)


def test_without_such_a_thread_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    monkeypatch.setattr(deep_stack.threading.Thread, "start", refuse)
    assert on_deep_stack(threading.get_ident) == threading.get_ident()
    assert threading.stack_size() == before
