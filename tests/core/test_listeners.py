"""`on_event` of very many requests of an engine, and of a program that forks in it."""

from __future__ import annotations

import os
import signal
import warnings

from cortexmlx import TokenEvent
from cortexmlx.core.callbacks import CallbackThreads
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import CortexError
from support.patience import soon


def test_a_child_that_is_forked_by_a_function_ends() -> None:
    """Its only thread is the one that told the event, and another request is never told there."""
    children: list[int] = []

    def fork(event: TokenEvent) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            children.append(os.fork())

    callers = CallbackThreads()
    handles = [RequestHandle(number, lambda request: None) for number in range(2)]
    for handle in handles:
        callers.subscribe(handle, fork)
    handles[0].fail(CortexError("it broke"))
    assert soon(lambda: children)
    try:
        assert soon(lambda: os.waitpid(children[0], os.WNOHANG)[0]), "the child never ends"
    except AssertionError:
        os.kill(children[0], signal.SIGKILL)
        raise
    finally:
        callers.abandon()
