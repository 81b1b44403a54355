"""An HTTP server for an engine: the OpenAI API and Anthropic's, for programs on this machine and others.

`app(engine)` is an ASGI application, to be mounted in a program of one's own. It needs the extra `server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cortexmlx.errors import CortexError
from cortexmlx.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from cortexmlx.engine import Engine

__all__ = ["ServerSettings", "app"]


def app(engine: Engine, settings: ServerSettings | None = None, **options: Any) -> Starlette:
    """Return an ASGI application that answers with `engine`, which stays the caller's to close. `options` are fields of
    ServerSettings. Raises CortexError if starlette is not installed.
    """
    try:
        from cortexmlx.server.application import application
    except ModuleNotFoundError as error:
        if error.name != "starlette":
            raise
        raise CortexError("the server needs starlette and uvicorn: pip install 'cortexmlx[server]'") from None
    return application(engine, settings or ServerSettings(**options))
