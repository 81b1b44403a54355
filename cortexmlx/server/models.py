"""The models of a server, by their names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cortexmlx.errors import CortexError, InvalidRequest, RequestTimeout
from cortexmlx.server.http import RequestRefused, error_reply, json_reply, wait_until_gone
from cortexmlx.server.model_pool import Lease, ModelPool, ModelSource, OpenEngines, Wait
from cortexmlx.server.settings import ServerSettings
from cortexmlx.types.messages import meant as suggestion

if TYPE_CHECKING:
    from cortexmlx.engine import Engine

__all__ = ["Lease", "Models"]

_SHOWN = 80
"""Characters of an unknown name that an error repeats."""


@dataclass(frozen=True)
class ModelTarget:
    """What a name means: a model, or one of its adapters."""

    model: str
    adapter: str | None = None
    """None: the model alone."""

    @property
    def name(self) -> str:
        """The name that replies say."""
        return self.model if self.adapter is None else f"{self.model}:{self.adapter}"


class Models:
    """The models of a server: which name means which, and leases of them."""

    def __init__(self, served: Engine | Mapping[str, Engine] | ModelPool, settings: ServerSettings) -> None:
        self._served: ModelSource = served if isinstance(served, ModelPool) else OpenEngines(served)
        self._settings = settings
        self._started = int(time.time())
        if settings.aliases:
            self._check_aliases()

    @property
    def name(self) -> str:
        """The name of the first model, which answers requests that name none."""
        return self._served.names[0]

    def loaded(self) -> list[tuple[str, Engine]]:
        """Return the engines of the models that are in memory, by name."""
        return self._served.loaded()

    async def take(self, name: object, request: Request | None = None) -> Lease:
        """Return the model of a name; None means the first. If it is not loaded, wait for it, as long as the client of
        `request` is there, and at most as long as a request may take.

        Raises RequestRefused for an unknown name, CannotLoad, ClientDisconnect and RequestTimeout.
        """
        target, loop, settled = self._resolve(name), asyncio.get_running_loop(), asyncio.Event()
        model = target.model

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settled.set)

        wait = self._served.ask(model, wake)
        try:
            if not wait.settled:
                await self._wait(model, wait, settled, request)
            lease = wait.lease()
        except BaseException:
            wait.leave()
            raise
        return lease if target.adapter is None else replace(lease, name=target.name, adapter=target.adapter)

    def is_ready(self, name: object) -> bool:
        """Return whether `take` would not wait. Raises RequestRefused for an unknown name."""
        return self._served.is_ready(self._resolve(name).model)

    async def list_models(self, request: Request) -> Response:
        """List all models under all their names, with their adapters, in one form for the OpenAI API and Anthropic's.
        Nothing is loaded.
        """
        names = list(self._listed)
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_reply({"object": "list", "data": [self._describe(name) for name in names], **pages})

    async def describe_model(self, request: Request) -> Response:
        """Describe a model. Nothing is loaded."""
        name = request.path_params["name"]
        try:
            self._resolve(name)
        except CortexError as error:
            return error_reply(error, request.url.path)
        return json_reply(self._describe(name))

    async def _wait(self, model: str, wait: Wait, settled: asyncio.Event, request: Request | None) -> None:
        """Wait until the wait is settled, or raise what ends it before."""
        tasks = [asyncio.ensure_future(settled.wait())]
        if request is not None:
            tasks.append(asyncio.ensure_future(wait_until_gone(request)))  # type: ignore[arg-type]
        try:
            await asyncio.wait(tasks, timeout=self._settings.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if not wait.settled:
            if len(tasks) > 1 and not tasks[1].cancelled():
                raise ClientDisconnect
            raise RequestTimeout(f"{model} was not loaded within {self._settings.timeout:g} s: ask again, or later")

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def _names(self) -> dict[str, str]:
        """All names of models, each with the model that it means."""
        names = self._served.names
        others = dict.fromkeys(self._settings.names, names[0])
        return {**{name: name for name in names}, **others, **self._settings.aliases}

    @property
    def _listed(self) -> dict[str, ModelTarget]:
        """All names that are listed: those of models, then `model:adapter` for each adapter."""
        models = {name: ModelTarget(model) for name, model in self._names.items()}
        adapted = [
            ModelTarget(model, adapter) for model in self._served.names for adapter in self._served.adapters(model)
        ]
        return models | {target.name: target for target in adapted if target.name not in models}

    def _resolve(self, name: object) -> ModelTarget:
        """Return what a name means. Raises InvalidRequest or RequestRefused."""
        if name is None:
            return ModelTarget(self.name)
        listed = self._listed
        if isinstance(name, str):
            if name in listed:
                return listed[name]
            if (adapted := self._resolve_adapter(name)) is not None:
                return adapted
        if self._settings.any_name and not (isinstance(name, str) and self._names_adapter(name)):
            return ModelTarget(self.name)
        if not isinstance(name, str):
            raise InvalidRequest(f"model is {name!r:.80}, but must be a text", field="model")
        told, shown = ", ".join(map(repr, listed)), name[:_SHOWN]
        why = f"there is no model {shown!r}{suggestion(shown, listed)}: this server has {told}"
        raise RequestRefused(404, why, "model_not_found")

    def _resolve_adapter(self, name: str) -> ModelTarget | None:
        """Return what a name means that is not listed: `alias:adapter`, or an adapter's own name, as in vLLM, if one
        model has it; None: it means nothing.
        """
        for own, adapter in self._parts(name):
            if adapter in self._served.adapters(own):
                return ModelTarget(own, adapter)
        having = [own for own in self._served.names if name in self._served.adapters(own)]
        return ModelTarget(having[0], name) if len(having) == 1 else None

    def _names_adapter(self, name: str) -> bool:
        """Return whether a name asks for an adapter of a model that has some, so that another model is no answer."""
        return any(self._served.adapters(own) for own, _ in self._parts(name))

    def _parts(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield each model that a name may begin with, and what follows its colon. Both may have colons, too."""
        for known, own in self._names.items():
            if name.startswith(f"{known}:"):
                yield own, name[len(known) + 1 :]

    def _check_aliases(self) -> None:
        for name, model in self._settings.aliases.items():
            if model not in self._served.names:
                raise InvalidRequest(f"{name!r} is to mean {model!r}, but there is no such model", field="aliases")
            if name in self._served.names and name != model:
                raise InvalidRequest(f"{name!r} is to mean {model!r}, but is a model's own name", field="aliases")

    def _describe(self, name: str) -> dict[str, Any]:
        target = self._resolve(name)
        model = target.model
        context = self._served.context_length(model)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "cortexmlx",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
            "lifecycle": "active",
            **({} if context is None else {"context_length": context, "max_input_tokens": context}),
            "loaded": self._served.is_loaded(model),
            **({} if target.adapter is None else {"parent": model}),
        }
