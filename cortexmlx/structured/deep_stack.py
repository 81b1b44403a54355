"""Run a function on a thread with a large stack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 1 << 30
"""Address space for the stack; only what is used takes memory. llguidance descends from each rule or schema into those
that it names, and a thread that has used up its stack kills the process. The deepest grammars of a million characters
take some 800 MB, those in use a few hundred KB.
"""

_lock = threading.Lock()


def on_deep_stack(make: Callable[[], T]) -> T:
    """Return `make()`, which runs on a thread with a stack of `STACK_BYTES`. Raises what it raises.

    If the system refuses such a thread, it runs on this one.
    """
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="cortexmlx grammar", daemon=True)
    if _started(thread):
        thread.join()
    else:
        run()
    if raised:
        raise raised.pop()
    return made[0]


def _started(thread: threading.Thread) -> bool:
    """Start a thread, and return whether that was possible. Python knows one size for all new threads; another one that
    begins meanwhile has this size, too, which does no harm.
    """
    with _lock:
        size = threading.stack_size()
        try:
            threading.stack_size(STACK_BYTES)
            thread.start()
        except (RuntimeError, ValueError):
            return False
        finally:
            threading.stack_size(size)
    return True
