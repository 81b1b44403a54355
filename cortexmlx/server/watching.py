"""Watching: what people and Prometheus see of the engines, at `/`, `/live` and `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx.server.exposition import CONTENT_TYPE, exposition
from cortexmlx.server.live import live
from cortexmlx.server.models import Models
from cortexmlx.server.page import page, wants_page
from cortexmlx.server.settings import ServerSettings
from cortexmlx.server.shared import Shared
from cortexmlx.server.tally import Tally
from cortexmlx.server.web.logged import Logged

LIVE = "/live"


class Watching:
    """Answers who watches. However many they are, the engines are asked once at a time, and a few times a second."""

    def __init__(self, models: Models, settings: ServerSettings, paths: Iterable[str]) -> None:
        self.tally = Tally(paths)
        self._models = models
        self._settings = settings
        # What one client does is nothing to another: several of them see totals.
        whole = len(set(settings.keys.values())) <= 1
        started = time.time()
        self._live = Shared(lambda: live(models.loaded(), whole))
        self._metrics = Shared(lambda: exposition(models.loaded(), self.tally, started))

    async def root(self, request: Request) -> Response:
        """Answer a browser with the page. Say to others what this is: with keys, not which model."""
        if wants_page(request):
            return page()
        name = "" if self._settings.keys else f": {self._models.name}"
        return Response(f"cortexmlx{name}\n".encode("utf-8", "replace"), media_type="text/plain")

    async def live(self, request: Request) -> Response:
        """Answer with what the page shows."""
        found = await self._live.take()
        headers = {"cache-control": "no-store", "vary": "accept-encoding", "x-content-type-options": "nosniff"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        body = found.gzipped if "content-encoding" in headers else found.plain
        return Response(body, headers=headers, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus."""
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(await self._metrics.take(), headers=headers, media_type=CONTENT_TYPE)

    def logged(self, logged: Logged, path: str) -> None:
        """Count a reply to a request for `path`, which is without what the server is mounted under, and log it. The
        page's own asking is not logged: it would fill the log.
        """
        self.tally.replied(logged, path)
        if self._settings.log is not None and not (path == LIVE and logged.status == 200):
            self._settings.log(logged)
