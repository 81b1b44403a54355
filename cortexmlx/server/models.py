"""The models of a server by the names that clients use: aliases, adapters, and leases."""

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

from cortexmlx.errors import InvalidRequest, RequestTimeout
from cortexmlx.protocols.ollama.models import TAG, ModelFacts
from cortexmlx.server.http import RequestRefused, json_reply, wait_for_disconnect
from cortexmlx.server.model_pool import ModelLease, ModelPool, ModelProvider, ModelWait, OpenEngines
from cortexmlx.server.settings import ServerSettings
from cortexmlx.stats import ModelInfo
from cortexmlx.types.messages import suggest_name as suggestion

if TYPE_CHECKING:
    from cortexmlx.engine import Engine

__all__ = ["ModelDirectory", "ModelLease"]

_MAX_SHOWN = 80
"""Characters of an unknown name that an error repeats."""


@dataclass(frozen=True)
class ModelTarget:
    """What a client's model name refers to: a model, or one of its LoRA adapters."""

    model: str
    adapter: str | None = None
    """None: the model alone."""

    @property
    def name(self) -> str:
        """The name for replies: `model`, or `model:adapter`."""
        return self.model if self.adapter is None else f"{self.model}:{self.adapter}"


class ModelDirectory:
    """Resolves the model names of requests, leases the models, and answers `/v1/models`."""

    def __init__(self, model_source: Engine | Mapping[str, Engine] | ModelPool, settings: ServerSettings) -> None:
        self._provider: ModelProvider = (
            model_source if isinstance(model_source, ModelPool) else OpenEngines(model_source)
        )
        self._settings = settings
        self._started = int(time.time())
        self._seen_models: dict[str, tuple[ModelInfo, tuple[str, ...]]] = {}
        """What the models are that were seen loaded, and what they can do."""
        if settings.aliases:
            self._check_aliases()

    @property
    def default_name(self) -> str:
        """The name of the first model, which answers requests that name none."""
        return self._provider.names[0]

    def loaded_engines(self) -> list[tuple[str, Engine]]:
        """Return the engines of the models in memory, each with its name."""
        return self._provider.loaded_engines()

    async def acquire(self, name: object, request: Request | None = None) -> ModelLease:
        """Return a lease of the model with this name (None: the first model), after waiting for its load. The wait ends
        early if the client disconnects or the request's time is over.

        Raises RequestRefused for an unknown name, CannotLoad, ClientDisconnect and RequestTimeout.
        """
        target, loop, settled_event = self._resolve(name), asyncio.get_running_loop(), asyncio.Event()
        model = target.model

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settled_event.set)

        wait = self._provider.request_model(model, wake)
        try:
            if not wait.settled:
                await self._wait_for_model(model, wait, settled_event, request)
            lease = wait.lease()
        except BaseException:
            wait.end()
            raise
        self._remember(model, lease.engine)
        return lease if target.adapter is None else replace(lease, name=target.name, adapter=target.adapter)

    def is_ready(self, name: object) -> bool:
        """Whether `acquire` would not wait. Raises RequestRefused for an unknown name."""
        return self._provider.is_ready(self._resolve(name).model)

    @property
    def names(self) -> list[str]:
        """All names of models and adapters."""
        return list(self._targets_by_name)

    def has(self, name: object) -> bool:
        """Whether a model or an adapter has this name. The setting `any_name` is ignored."""
        try:
            self._resolve(name, any_name=False)
        except InvalidRequest:
            return False
        return True

    def facts(self, name: object) -> ModelFacts:
        """Return what is known of a model, without loading it. Raises RequestRefused for an unknown name."""
        target = self._resolve(name)
        for model, engine in self.loaded_engines():
            self._remember(model, engine)
        info, skills = self._seen_models.get(target.model, (None, ()))
        own_name = name.removesuffix(TAG) if isinstance(name, str) else ""
        return ModelFacts(
            own_name if own_name in self.names else target.name,
            "" if target.adapter is None else target.model,
            self._started,
            self._provider.model_memory(target.model),
            self._provider.context_length(target.model),
            info,
            skills,
        )

    def _remember(self, model: str, engine: Engine) -> None:
        """Remember what a loaded model is and can do, for when it is unloaded."""
        if model not in self._seen_models:
            skills = {"vision": engine.sees_images, "tools": engine.calls_tools, "thinking": engine.thinks}
            self._seen_models[model] = (engine.info, tuple(name for name, has in skills.items() if has))

    async def list_models(self, request: Request) -> Response:
        """Handle GET `/v1/models`: all names of models and adapters, in a form for OpenAI's API and Anthropic's."""
        names = self.names
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_reply({"object": "list", "data": [self._describe(name) for name in names], **pages})

    async def describe_model(self, request: Request) -> Response:
        """Handle GET `/v1/models/NAME`: describe a model without loading it."""
        return json_reply(self._describe(request.path_params["name"]))

    async def _wait_for_model(
        self, model: str, wait: ModelWait, settled_event: asyncio.Event, request: Request | None
    ) -> None:
        """Wait until the model's request is settled. Raises ClientDisconnect or RequestTimeout."""
        tasks = [asyncio.ensure_future(settled_event.wait())]
        if request is not None:
            tasks.append(asyncio.ensure_future(wait_for_disconnect(request)))  # type: ignore[arg-type]
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
    def _models_by_name(self) -> dict[str, str]:
        """All model names and aliases, each with the model's own name."""
        names = self._provider.names
        default_names = dict.fromkeys(self._settings.names, names[0])
        return {**{name: name for name in names}, **default_names, **self._settings.aliases}

    @property
    def _targets_by_name(self) -> dict[str, ModelTarget]:
        """All names in the list of models: models, aliases, then `model:adapter` for each adapter."""
        models = {name: ModelTarget(model) for name, model in self._models_by_name.items()}
        adapter_targets = [
            ModelTarget(model, adapter) for model in self._provider.names for adapter in self._provider.adapters(model)
        ]
        return models | {target.name: target for target in adapter_targets if target.name not in models}

    def _resolve(self, name: object, *, any_name: bool = True) -> ModelTarget:
        """Return the model and adapter that a name refers to. `any_name`: an unknown name may mean the first model, if
        the settings say so. Raises InvalidRequest or RequestRefused (404).
        """
        if name is None:
            return ModelTarget(self.default_name)
        targets = self._targets_by_name
        if isinstance(name, str):
            if name in targets:
                return targets[name]
            if (adapter_target := self._resolve_adapter(name)) is not None:
                return adapter_target
            if name.endswith(TAG):
                return self._resolve(name.removesuffix(TAG), any_name=any_name)
        if any_name and self._settings.any_name and not (isinstance(name, str) and self._may_name_adapter(name)):
            return ModelTarget(self.default_name)
        if not isinstance(name, str):
            raise InvalidRequest(f"model is {name!r:.80}, but must be a text", field="model")
        known_names, shown_name = ", ".join(map(repr, targets)), name[:_MAX_SHOWN]
        message = f"there is no model {shown_name!r}{suggestion(shown_name, targets)}: this server has {known_names}"
        raise RequestRefused(404, message, "model_not_found")

    def _resolve_adapter(self, name: str) -> ModelTarget | None:
        """Return the adapter that an unlisted name means (`alias:adapter`, or a unique adapter's name), or None."""
        for model, adapter in self._split_adapter_name(name):
            if adapter in self._provider.adapters(model):
                return ModelTarget(model, adapter)
        matching_models = [own for own in self._provider.names if name in self._provider.adapters(own)]
        return ModelTarget(matching_models[0], name) if len(matching_models) == 1 else None

    def _may_name_adapter(self, name: str) -> bool:
        """Whether a name has the form `model:adapter` and the model has adapters. Then no other model may answer."""
        return any(self._provider.adapters(model) for model, _ in self._split_adapter_name(name))

    def _split_adapter_name(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield each way to split a name at a colon into a model (by name or alias) and a possible adapter's name."""
        for known_name, model in self._models_by_name.items():
            if name.startswith(f"{known_name}:"):
                yield model, name[len(known_name) + 1 :]

    def _check_aliases(self) -> None:
        """Raise InvalidRequest for an alias that names no model, or that hides another model."""
        for name, model in self._settings.aliases.items():
            if model not in self._provider.names:
                raise InvalidRequest(f"{name!r} is to mean {model!r}, but there is no such model", field="aliases")
            if name in self._provider.names and name != model:
                raise InvalidRequest(f"{name!r} is to mean {model!r}, but is a model's own name", field="aliases")

    def _describe(self, name: str) -> dict[str, Any]:
        """Return the entry of a model in `/v1/models`."""
        target = self._resolve(name)
        model = target.model
        context = self._provider.context_length(model)
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
            "loaded": self._provider.is_loaded(model),
            **({} if target.adapter is None else {"parent": model}),
        }
