"""Waits that a signal can interrupt, whichever moment it comes at.

Python runs a signal handler on the main thread, between two instructions. A signal interrupts a wait for a lock, unless
it comes between the last instruction and the wait, or the system gives it to another thread. Then the handler runs only
after the wait. So no wait is longer than `LONGEST_SECONDS`; it continues afterwards.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

LONGEST_SECONDS = 0.25

T = TypeVar("T")


def wait_until(
    condition_variable: threading.Condition, predicate: Callable[[], bool], timeout: float | None = None
) -> bool:
    """Wait at most `timeout` seconds until `predicate()` holds; return whether it does. The lock must be held."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not predicate():
        remaining = LONGEST_SECONDS if deadline is None else min(deadline - time.monotonic(), LONGEST_SECONDS)
        if remaining <= 0:
            return False
        condition_variable.wait(remaining)
    return True


def take_next(items: queue.SimpleQueue[T]) -> T:
    """Wait for the next item of a queue, and return it."""
    while True:
        with suppress(queue.Empty):
            return items.get(timeout=LONGEST_SECONDS)
