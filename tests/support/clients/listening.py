"""An application that is served on this machine, to clients of any kind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cortexmlx.server.listening import HttpServer, open_listener
from support.patience import PATIENCE


@contextmanager
def listening(application: Any, **options: Any) -> Iterator[str]:
    """Serve an application; yields its address."""
    server = HttpServer(application, open_listener("127.0.0.1", 0), **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(PATIENCE)
