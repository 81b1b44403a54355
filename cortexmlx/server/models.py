"""The models of a server, by their names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.messages import meant
from cortexmlx.server.settings import ServerSettings
from cortexmlx.server.web.http import Refused, error_reply, json_reply

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


class Lease:
    """A model while a request needs it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        """The name that replies say."""

    def release(self) -> None:
        """Say that the request has ended. Safe to call again."""


class Models:
    """The models of a server."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._started = int(time.time())

    async def take(self, name: object) -> Lease:
        """Return the model of a name; None means the only model. Raises Refused for an unknown name."""
        self._check(name)
        return Lease(self._engine, self.name)

    @property
    def name(self) -> str:
        """The model's name, of a folder or a file without the path, which is nobody's business."""
        name = self._engine.info.name
        path = Path(name)
        return path.name.removesuffix(".gguf") if path.is_absolute() or path.exists() else name

    async def listed(self, request: Request) -> Response:
        """List the model under all its names."""
        return json_reply({"object": "list", "data": [self._described(name) for name in self._names]})

    async def one(self, request: Request) -> Response:
        """Describe the model."""
        name = request.path_params["name"]
        try:
            self._check(name)
        except CortexError as error:
            return error_reply(error, request.url.path)
        return json_reply(self._described(name))

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.name, *self._settings.names)

    def _check(self, name: object) -> None:
        if name is None or self._settings.any_name or name in self._names:
            return
        if not isinstance(name, str):
            raise InvalidRequest(f"model is {name!r:.80}, but must be a text", field="model")
        known = ", ".join(map(repr, self._names))
        why = f"there is no model {name[:80]!r}{meant(name, self._names)}: this server has {known}"
        raise Refused(404, f"{why}. --alias gives it other names, --any-name all", "model_not_found")

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "cortexmlx",
            "context_length": self._engine.longest_request,
        }
