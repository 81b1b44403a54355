"""Make a server's pool of models from the command line, and divide the memory among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cortexmlx.cli import engine as engines
from cortexmlx.cli.prompts import check_variables
from cortexmlx.cli.terminal.exits import exit_immediately
from cortexmlx.cli.terminal.progress import loading_progress
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import DownloadFailed, InvalidRequest, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.kv import sizing
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.hub import fetch_config
from cortexmlx.models.resolve import SourceKind, resolve_model
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.scheduling.shortage import LengthLimits
from cortexmlx.server.model_pool import ModelPool, ServedModel
from cortexmlx.system.machine import memory_bytes, working_set_bytes
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.cli.planning.figures import MachineFigures, MemoryPlan
    from cortexmlx.cli.planning.source import PlanSource
    from cortexmlx.engine import Engine


@dataclass(frozen=True)
class PlannedModel:
    """The memory that one model of a server takes when it is loaded, in bytes."""

    config: EngineConfig
    """With the KV memory that is planned, so that each load takes as much."""
    fixed: int
    """Weights, what the steps of all rows keep, and what images take."""
    kv: int
    context_length: int
    """Tokens that a prompt and its answer may have."""

    @property
    def memory(self) -> int:
        """All bytes that the loaded model takes."""
        return self.fixed + self.kv


def plan_memory(
    configs: Mapping[str, EngineConfig], budget: int, keep: Collection[str] = ()
) -> dict[str, PlannedModel]:
    """Return what each model gets of `budget` bytes. No weights are loaded.

    The models share half of what their weights leave, if that holds a text of 32k tokens, or of its context, for each.
    Otherwise each gets what it would have alone, beside the models in `keep`. Raises InvalidRequest with the numbers
    for a model that cannot fit, and ModelUnsupported and what `cortexmlx plan` raises.
    """
    models = {name: ModelPlanner(name, config) for name, config in configs.items()}
    if together := _plan_together(models, budget):
        return together
    plans: dict[str, PlannedModel] = {}
    for name in sorted(models, key=lambda name: name not in keep):
        plans[name] = models[name].make_plan(budget, None)
        if name in keep:
            budget -= plans[name].memory
    return {name: plans[name] for name in configs}


def _plan_together(models: Mapping[str, ModelPlanner], budget: int) -> dict[str, PlannedModel]:
    """Return plans in which all models fit at once; empty if they do not fit, or if one could not hold a text."""
    remaining = budget - sum(model.fixed for model in models.values())
    if remaining <= 0:
        return {}
    share = remaining // (2 * len(models))
    if any(model.config.kv_memory is None and share < model.min_kv(budget) for model in models.values()):
        return {}
    plans = {name: model.make_plan(budget, min(share, model.default_kv(budget))) for name, model in models.items()}
    return plans if sum(each.memory for each in plans.values()) <= budget else {}


class ModelPlanner:
    """Plans one model with different amounts of memory."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        from cortexmlx.attention.backends import auto_backend_name
        from cortexmlx.cli.planning.skeleton import add_drafts, build_skeleton
        from cortexmlx.cli.planning.source import find_source
        from cortexmlx.models.adapters.files import read_adapter

        source = find_source(str(config.model))
        folders = (*([] if config.adapter is None else [config.adapter]), *(config.adapters or {}).values())
        source = replace(source, adapter=sum(read_adapter(folder).added_bytes for folder in folders))
        skeleton = build_skeleton(source.config).with_quantized_kv(config.kv_bits, config.kv_group_size)
        if skeleton.refusal is not None:
            raise ModelUnsupported(f"{name}: {skeleton.refusal}")
        self.name, self.config = name, config
        self._source: PlanSource = source
        self._skeleton, self._draft = add_drafts(skeleton, source, config)
        self._load = sizing.ArenaDemand.from_options(
            config.max_rows, config.prefill_budget, config.block_size, auto_backend_name() == "metal"
        )
        self.fixed = self._figures(0, None).reserved_bytes

    def _figures(self, budget: int, kv: int | None) -> MachineFigures:
        """Return the figures of the model on a machine with `budget` bytes, `kv` of them for keys and values."""
        from cortexmlx.cli.planning.figures import make_plan
        from cortexmlx.cli.planning.machine import this_machine

        machine = replace(this_machine(), working_set=budget)
        memory, keep = self.config.kv_bytes or kv, self.config.keep
        plan: MemoryPlan = make_plan(
            self._source,
            self._skeleton,
            machine,
            load=self._load,
            kv_memory=memory,
            keep=keep if memory else None,
            draft=self._draft,
        )
        return plan.here

    def needed_bytes(self, tokens: int) -> int:
        """Return the bytes that the model takes with one text of `tokens` tokens, or of as many as its context has."""
        per_token = self._figures(0, None).kv_bytes_per_token
        return self.fixed + min(tokens, self._skeleton.context_length) * per_token

    def default_kv(self, budget: int) -> int:
        """Return the bytes of keys and values that the model gets if it has the whole `budget`."""
        figures = self._figures(budget, None)
        return self.config.kv_bytes or figures.arena_bytes + figures.draft_kv_bytes + figures.snapshot_bytes

    def min_kv(self, budget: int) -> int:
        """Return the bytes of keys and values that one text of the usual length takes."""
        figures = self._figures(budget, None)
        context = self._skeleton.context_length
        tokens = min(figures.row_tokens or context, context, sizing.DEFAULT_TOKENS_PER_ROW)
        return min(self.default_kv(budget), tokens * figures.kv_bytes_per_token)

    def make_plan(self, budget: int, kv: int | None) -> PlannedModel:
        """Return a plan with `kv` bytes for keys and values; None: as if alone in `budget`. Raises InvalidRequest."""
        memory = self.config.kv_bytes or kv or self.default_kv(budget)
        usage_text = f"{self.name} takes {format_bytes(self.fixed)} for weights and steps"
        if not memory:
            raise InvalidRequest(
                f"{usage_text}, and {format_bytes(budget)} are left for it: give the models more (--memory), or choose "
                "a smaller one"
            )
        if self.fixed + memory > budget:
            raise InvalidRequest(
                f"{usage_text} and {format_bytes(memory)} for keys and values, but {format_bytes(budget)} are left for "
                "it: give the models more (--memory), or less for keys and values (--kv-memory)"
            )
        figures = self._figures(budget, memory)
        if figures.kv_bytes_per_token and not figures.arena_tokens:
            raise InvalidRequest(
                f"{usage_text}, and {format_bytes(memory)} hold no block of keys and values: give the models more "
                "(--memory)"
            )
        capacity = figures.arena_tokens if figures.kv_bytes_per_token else self._skeleton.context_length
        context_length = LengthLimits(self._skeleton.context_length, None, self.config.keep).max_answer_tokens(
            0, capacity
        )
        return PlannedModel(replace(self.config, kv_memory=memory), self.fixed, memory, context_length)


@dataclass(frozen=True)
class DefaultSettings:
    """The sampling and template variables from the command line, for requests that do not set them."""

    sampling: Mapping[str, Any]
    """The values that were typed. The others are as the model's makers recommend."""
    variables: dict[str, object]

    def resolve(self, engine: Engine) -> RequestDefaults:
        """Return a model's request defaults. Raises InvalidRequest if its template does not read a variable."""
        check_variables(engine, self.variables)
        recommended_sampling: dict[str, Any] = {"max_tokens": None, **dict(engine.info.sampling)}
        return RequestDefaults(SamplingParams(**{**recommended_sampling, **self.sampling}), self.variables)


def open_pool(
    configs: Mapping[str, EngineConfig],
    default_settings: DefaultSettings,
    *,
    memory: int | None,
    keep: Collection[str],
    idle: float | None,
    tell: Callable[[str], None] | None,
) -> ModelPool:
    """Return a pool of models by name, none of which is loaded. If there are several, or `memory` is given, missing
    files are downloaded. Raises InvalidRequest for a model that never fits into `memory` bytes (None: the machine's).

    A single model is not planned, unless `memory` is given: it takes what it always takes.
    """
    if len(configs) == 1 and memory is None:
        [(name, config)] = configs.items()
        return ModelPool([_make_served_model(name, config, default_settings)], keep=keep, idle=idle, tell=tell)
    if memory is not None and memory > memory_bytes():
        raise InvalidRequest(
            f"--memory {format_bytes(memory)} is more than this machine has: {format_bytes(memory_bytes())}, "
            f"{format_bytes(working_set_bytes())} of it for models"
        )
    budget = memory or working_set_bytes()
    for config in configs.values():
        with _loading_bar(str(config.model)) as on_progress:
            engines.download_model(config.model, on_progress, config.active_draft)
    plans = plan_memory(configs, budget, keep)
    models = [
        _make_served_model(name, plan.config, default_settings, memory=plan.memory, context_length=plan.context_length)
        for name, plan in plans.items()
    ]
    return ModelPool(models, memory=budget, keep=keep, idle=idle, tell=tell)


def pull_model(
    pool: ModelPool, config: EngineConfig, default_settings: DefaultSettings, name: str, on_progress: OnProgress
) -> None:
    """Download a model of the hub and add it to the pool, within the pool's budget. `config` has the server's options.
    Raises what downloading raises, and InvalidRequest and ModelUnsupported if it can never be loaded.
    """
    if resolve_model(name).kind is not SourceKind.HUB:
        raise ModelNotFound(f"{name} is no hub id where the server runs: a folder or a file has this name")
    assert pool.memory is not None
    budget = pool.memory - pool.kept_memory
    configs = {name: replace(config, model=name, adapter=None, adapters=None, draft=None)}
    try:
        plan_memory(configs, budget)  # what cannot fit is not downloaded
        engines.download_model(name, on_progress)
        plan = plan_memory(configs, budget)[name]
    except (DownloadFailed, ModelCorrupt, ModelUnsupported) as error:  # clients read it: no path in it
        raise type(error)(str(error).replace(str(fetch_config(name).parents[1]), name)) from None
    sizes: dict[str, Any] = {"memory": plan.memory, "context_length": plan.context_length}
    pool.add(_make_served_model(name, plan.config, default_settings, **sizes))


def preload(pool: ModelPool, models: Mapping[str, str]) -> None:
    """Load models by name, each with a progress bar on stderr. Ctrl-C ends the program. Raises what loading raises."""
    for name, model in models.items():
        with _loading_bar(model) as on_progress:
            lease = pool.acquire(name, on_progress)
        engines.print_notes(lease.engine)
        lease.release()


@contextmanager
def _loading_bar(model: str) -> Iterator[OnProgress]:
    """Show a progress bar in this context. Ctrl-C ends the program immediately: nothing can be lost yet."""
    try:
        with loading_progress(model) as on_progress:
            yield on_progress
    except KeyboardInterrupt:
        exit_immediately()


def _make_served_model(name: str, config: EngineConfig, default_settings: DefaultSettings, **plan: Any) -> ServedModel:
    """Return a model's entry in the pool: it loads the engine on demand."""

    def load(on_progress: OnProgress) -> Engine:
        return engines.load_engine(replace(config, on_progress=on_progress))

    return ServedModel(name, load, adapters=tuple(config.adapters or ()), defaults=default_settings.resolve, **plan)
