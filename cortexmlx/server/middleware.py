"""ASGI middlewares: access control, the request log, and normalization of URL paths.

A streamed answer passes through each of them unchanged.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortexmlx.server.http import SCOPE_CLIENT, SCOPE_CUT, SCOPE_MODEL, SCOPE_TOKENS, RequestRefused, error_reply, log
from cortexmlx.server.settings import LoggedRequest, ServerSettings

PUBLIC_PATHS = ("/health", "/")
"""Paths that are answered without a key. They tell nothing but that the server runs; the page asks for the key."""

_PREFLIGHT_HEADERS = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta, *"),
    (b"access-control-max-age", b"600"),
)


class AccessControl:
    """Middleware that refuses requests without a valid API key (401), for another host or from a foreign page (403)."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._logged_origins: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        if reason := self._refusal_reason(headers, origin):
            await error_reply(RequestRefused(403, reason), scope["path"])(scope, receive, send)
            return
        cors: list[tuple[bytes, bytes]] = []
        if origin is not None and self._allows_origin(origin):
            cors = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and origin is not None:
            await send({"type": "http.response.start", "status": 204, "headers": [*cors, *_PREFLIGHT_HEADERS]})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start" and cors:
                message["headers"] = [*message.get("headers", ()), *cors]
            await send(message)

        path = application_path(scope)
        if self._settings.keys and path not in PUBLIC_PATHS:
            client = self._find_client(headers)
            if client is None:
                reason = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                refusal = error_reply(RequestRefused(401, reason, headers={"www-authenticate": "Bearer"}), path)
                await refusal(scope, receive, send_with_cors)
                return
            scope[SCOPE_CLIENT] = client

        await self._app(scope, receive, send_with_cors)

    def _refusal_reason(self, headers: Mapping[str, str], origin: str | None) -> str:
        """Return why a request's host or the web page that sent it is not allowed; empty if both are."""
        host = _host_name(headers.get("host", ""))
        names = self._settings.hosts
        # Only HTTP/1.0 may leave the header out, as load balancers do. The pages of a browser cannot.
        if not self._settings.keys and "host" in headers and host not in names and "*" not in names:
            return f"the host {host[:80]!r} is not served: --host with --api-key-file, or --insecure, allows others"
        if origin is None or self._allows_origin(origin) or origin.partition("://")[2] == headers.get("host"):
            return ""
        if origin not in self._logged_origins and len(self._logged_origins) < 100:  # of any number that are made up
            self._logged_origins.add(origin)
            log.warning("pages of %.82r were refused: --cors %.80s allows them", origin, origin)
        return f"pages of {origin[:80]!r} may not ask: --cors allows them"

    def _allows_origin(self, origin: str) -> bool:
        """Whether web pages of an origin may send requests."""
        return "*" in self._settings.origins or origin in self._settings.origins

    def _find_client(self, headers: Mapping[str, str]) -> str | None:
        """Return the client whose API key a request has, or None. All keys are compared, each in constant time."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        api_key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        matched_client = None
        for key, client in self._settings.keys.items():
            if hmac.compare_digest(key.encode(), api_key.encode()):
                matched_client = client
        return matched_client


def _host_name(host: str) -> str:
    """Return the name in a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class RequestLog:
    """Middleware that passes each ended request, with its path inside the application, to the callback `write`."""

    def __init__(self, app: ASGIApp, write: Callable[[LoggedRequest, str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, is_complete = time.perf_counter(), 499, False

        async def watch_and_send(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch_and_send)
        finally:
            seconds = time.perf_counter() - started
            path, status = scope["path"][:200], status if is_complete else 499
            status = 503 if scope.get(SCOPE_CUT) else status
            log_entry = LoggedRequest(
                scope["method"], path, status, seconds, scope.get(SCOPE_TOKENS), scope.get(SCOPE_MODEL)
            )
            self._write(log_entry, application_path(scope))


_VERSION = "/v1"


class PathNormalizer:
    """Middleware that maps path variants, with `//` or without `/v1`, to the served path. It does not redirect."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, with the path that it serves."""
        if scope["type"] == "http" and (path := self.normalize(application_path(scope))) != application_path(scope):
            scope = {**scope, "path": scope.get("root_path", "") + path}
        await self._app(scope, receive, send)

    def normalize(self, path: str) -> str:
        """Return the served path that a client's path means, or the client's path itself if it means none."""
        clean_path = re.sub(r"/{2,}", "/", path).rstrip("/") or "/"
        unversioned_path = re.sub(rf"^(?:{_VERSION})+(?=/)", "", clean_path)
        candidates = (clean_path, _VERSION + unversioned_path, unversioned_path)
        return next((each for each in candidates if self._is_served(each)), path)

    def _is_served(self, path: str) -> bool:
        """Whether a path is served, also one below the path of a list, such as `/v1/models/NAME`."""
        return path in self._paths or any(path.startswith(f"{each}/") for each in self._paths if each.startswith("/v1"))


def application_path(scope: Mapping[str, Any]) -> str:
    """Return a request's path inside the application, which may be mounted below another path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
