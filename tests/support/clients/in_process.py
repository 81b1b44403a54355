"""A client of an ASGI application without a socket: most of what a server promises does not depend on one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2 as httpx

from support.patience import PATIENCE


class InProcess(httpx.BaseTransport):
    """Hands requests to an application, on an event loop of its own. A streamed reply comes when it is whole."""

    def __init__(self, application: Any) -> None:
        self._inner = httpx.ASGITransport(app=application)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the application's whole reply."""
        request.read()
        return asyncio.run_coroutine_threadsafe(self._reply(request), self._loop).result(PATIENCE)

    async def _reply(self, request: httpx.Request) -> httpx.Response:
        reply = await self._inner.handle_async_request(request)
        body = b"".join([piece async for piece in reply.aiter_raw()])  # perhaps compressed, as on a socket
        return httpx.Response(reply.status_code, headers=reply.headers, stream=httpx.ByteStream(body))

    def close(self) -> None:
        """End the event loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


def in_process(application: Any, **options: Any) -> httpx.Client:
    """Return a client of an application."""
    return httpx.Client(transport=InProcess(application), base_url="http://localhost", **options)
