"""Who may ask: keys, names of the host, and origins of web pages. An ASGI middleware that a streamed answer passes
through unchanged.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortexmlx.server.http import Refused, error_reply
from cortexmlx.server.request_log import path_in
from cortexmlx.server.settings import ServerSettings

OPEN = ("/health", "/")
"""Paths that are answered without a key. They tell nothing but that the server runs; the page asks for the key."""

CLIENT = "cortexmlx.client"
"""The name of the client, in the scope of a request."""

_ALLOWED = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta, *"),
    (b"access-control-max-age", b"600"),
)


class Access:
    """Lets through what may ask. A request without a valid key is 401, one for another host or from a foreign page
    403.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        origin = headers.get("origin")
        if why := self._foreign(headers, origin):
            await error_reply(Refused(403, why), scope["path"])(scope, receive, send)
            return
        granted = _granted(origin) if origin is not None and self._trusts(origin) else []
        if scope["method"] == "OPTIONS" and origin is not None:
            await send({"type": "http.response.start", "status": 204, "headers": [*granted, *_ALLOWED]})
            await send({"type": "http.response.body", "body": b""})
            return

        async def also(message: Message) -> None:
            if message["type"] == "http.response.start" and granted:
                message["headers"] = [*message.get("headers", ()), *granted]
            await send(message)

        path = path_in(scope)
        if self._settings.keys and path not in OPEN:
            client = self._client(headers)
            if client is None:
                why = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                refused = error_reply(Refused(401, why, headers={"www-authenticate": "Bearer"}), path)
                await refused(scope, receive, also)
                return
            scope[CLIENT] = client

        await self._app(scope, receive, also)

    def _foreign(self, headers: Mapping[str, str], origin: str | None) -> str:
        """Return why a request may come from a page of the web that nobody allowed; empty: it does not."""
        host = _name_of(headers.get("host", ""))
        names = self._settings.hosts
        if not self._settings.keys and host not in names and "*" not in names:
            return f"the host {host[:80]!r} is not served: --host with --api-key-file, or --insecure, allows others"
        if origin is None or self._trusts(origin) or origin.partition("://")[2] == headers.get("host"):
            return ""
        return f"pages of {origin[:80]!r} may not ask: --cors allows them"

    def _trusts(self, origin: str) -> bool:
        return "*" in self._settings.origins or origin in self._settings.origins

    def _client(self, headers: Mapping[str, str]) -> str | None:
        """Return the client whose key a request has. All keys are compared, each in constant time."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = None
        for key, client in self._settings.keys.items():
            if hmac.compare_digest(key.encode(), given.encode()):
                found = client
        return found


def _granted(origin: str) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _name_of(host: str) -> str:
    """Return the name in a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
