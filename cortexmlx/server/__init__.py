"""An HTTP server for engines: the OpenAI API, Anthropic's and Ollama's, for programs on this machine and others.

`app(engine)` is an ASGI application, to be mounted in a program of one's own. `app({"small": a, "big": b})` has several
engines, and `app(pool)` models that are loaded on demand. It needs the extra `server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import CortexError
from cortexmlx.server.model_pool import ModelPool, ServedModel
from cortexmlx.server.settings import SERVER_INSTALL, ServerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from cortexmlx.engine import Engine

__all__ = ["ModelPool", "ServedModel", "ServerSettings", "app"]


def app(
    engine: Engine | Mapping[str, Engine] | ModelPool, settings: ServerSettings | None = None, **options: Any
) -> Starlette:
    """Return an ASGI application (Starlette) that serves one engine, several by name, or the models of a pool. It
    does not close them. `options` are fields of ServerSettings. Raises InvalidRequest for an alias that names no model,
    and CortexError if starlette is not installed.
    """
    try:
        from cortexmlx.server.application import build_application
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "prometheus_client"):
            raise
        raise CortexError(f"the server needs {error.name}: `{SERVER_INSTALL}`") from None
    return build_application(engine, settings or ServerSettings(**options))
