"""The paths that clients ask by mistake or by habit: without `/v1`, with it twice, with a slash too many."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from cortexmlx.server.web.logged import path_in

_VERSION = "/v1"


class UsualPaths:
    """An ASGI middleware that serves them under the path that is meant. A redirection would lose the body."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer."""
        if scope["type"] == "http":
            scope = {**scope, "path": scope.get("root_path", "") + self.meant(path_in(scope))}
        await self._app(scope, receive, send)

    def meant(self, path: str) -> str:
        """Return the path that is served for this one: the same, if none is."""
        plain = re.sub(r"/{2,}", "/", path)
        plain = plain.rstrip("/") or "/"
        bare = re.sub(rf"^(?:{_VERSION})+(?=/)", "", plain)
        return next((each for each in (plain, _VERSION + bare, bare) if self._serves(each)), path)

    def _serves(self, path: str) -> bool:
        """Return whether a path is served, or is that of one thing of a list, such as a model."""
        return path in self._paths or any(path.startswith(f"{each}/") for each in self._paths if each.startswith("/v1"))
