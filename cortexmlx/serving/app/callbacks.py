"""Events told to functions of the app's own: `on_event`, on a thread of the request's own, and `on_progress`."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

from cortexmlx.errors import CortexError
from cortexmlx.progress import OnProgress
from cortexmlx.request import TokenEvent
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.worker import stop_all

log = logging.getLogger("cortexmlx")

_AT_EXIT = 1.0
"""Seconds that the end of the program waits for those who have not been told of the end of their requests."""

_tellers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def tell(handle: RequestHandle, on_event: Callable[[TokenEvent], None]) -> None:
    """Have `on_event` called with every event of a request from now on; the last has a completion or an error."""
    teller = threading.Thread(target=_tell, args=(handle, on_event), name="cortexmlx-events", daemon=True)
    teller.start()
    _tellers.add(teller)


def tell_progress(on_progress: OnProgress | None, event: TokenEvent) -> None:
    """Tell `on_progress`, if somebody gave one, of an event that says how far a prompt is."""
    if on_progress is not None and event.progress is not None:
        on_progress(event.progress)


def _tell(handle: RequestHandle, on_event: Callable[[TokenEvent], None]) -> None:
    events = iter(handle)
    try:
        while True:
            try:
                event = next(events, None)
            except CortexError as error:
                event = TokenEvent.failed(error)
            if event is None:
                return
            on_event(event)
    except BaseException:  # it ends this thread, and Python would print all but a SystemExit
        log.exception("on_event raised, so it is not told of the rest of request %d", handle.id)


@atexit.register
def _tell_of_the_end() -> None:
    """A program that ends closes its engines; who waits for events is told before the interpreter is gone. Python calls
    the newest of these functions first, so the engines are stopped here.
    """
    stop_all()
    until = time.monotonic() + _AT_EXIT
    for teller in list(_tellers):
        teller.join(max(0.0, until - time.monotonic()))
