"""The pool of a server: its models as the command line gives them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cortexmlx.cli import engine as engines
from cortexmlx.cli.prompts import checked
from cortexmlx.cli.serve.memory import plan_memory
from cortexmlx.cli.terminal.exits import leave_now
from cortexmlx.cli.terminal.progress import loading
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.protocols.request import Defaults
from cortexmlx.server.model_pool import ModelPool, ServedModel
from cortexmlx.system.machine import memory_bytes, working_set_bytes
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


@dataclass(frozen=True)
class Asked:
    """What requests do not set."""

    sampling: Mapping[str, Any]
    """The values that were typed. The others are as the model's makers recommend."""
    variables: dict[str, object]

    def of(self, engine: Engine) -> Defaults:
        """Return the defaults of a model. Raises InvalidRequest if its template does not read a variable."""
        checked(engine, self.variables)
        recommended: dict[str, Any] = {"max_tokens": None, **dict(engine.info.sampling)}
        return Defaults(SamplingParams(**{**recommended, **self.sampling}), self.variables)


def open_pool(
    configs: Mapping[str, EngineConfig],
    asked: Asked,
    *,
    memory: int | None,
    keep: Collection[str],
    idle: float | None,
    tell: Callable[[str], None] | None,
) -> ModelPool:
    """Return a pool of models by name. None of them is loaded. What is not on this machine is downloaded, if there are
    several. Raises InvalidRequest for a model that never fits into `memory` bytes (None: the machine's).

    A single model is not planned, unless `memory` is given: it takes what it always takes.
    """
    if len(configs) == 1 and memory is None:
        [(name, config)] = configs.items()
        return ModelPool([_served(name, config, asked)], keep=keep, idle=idle, tell=tell)
    if memory is not None and memory > memory_bytes():
        raise InvalidRequest(
            f"--memory {format_bytes(memory)} is more than this machine has: {format_bytes(memory_bytes())}, "
            f"{format_bytes(working_set_bytes())} of it for models"
        )
    budget = memory or working_set_bytes()
    for config in configs.values():
        with _until_interrupted(str(config.model)) as on_progress:
            engines.fetch(config.model, on_progress)
            if config.used_draft is not None:
                engines.fetch(config.used_draft, on_progress)
    planned = plan_memory(configs, budget, keep)
    models = [
        _served(name, plan.config, asked, memory=plan.memory, context_length=plan.context_length)
        for name, plan in planned.items()
    ]
    return ModelPool(models, memory=budget, keep=keep, idle=idle, tell=tell)


def preload(pool: ModelPool, models: Mapping[str, str]) -> None:
    """Load models by name, each with a progress bar on stderr. Ctrl-C ends the program. Raises what loading raises."""
    for name, model in models.items():
        with _until_interrupted(model) as on_progress:
            lease = pool.take(name, on_progress)
        engines.tell(lease.engine)
        lease.release()


@contextmanager
def _until_interrupted(model: str) -> Iterator[OnProgress]:
    """Show a progress bar. Ctrl-C ends the program at once: nothing can be lost yet."""
    try:
        with loading(model) as on_progress:
            yield on_progress
    except KeyboardInterrupt:
        leave_now()


def _served(name: str, config: EngineConfig, asked: Asked, **plan: Any) -> ServedModel:
    def opened(on_progress: OnProgress) -> Engine:
        return engines.load(replace(config, on_progress=on_progress))

    return ServedModel(name, opened, adapters=tuple(config.adapters or ()), defaults=asked.of, **plan)
