"""EngineModel: what the engine's core needs of a model, whether its weights are in this process or on hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.embedding_support import EmbeddingSupport
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.errors import InvalidRequest
from cortexmlx.execution.boundary import AdapterSet, Runner
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.sizing import ArenaDemand
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.models import LoadedModel
from cortexmlx.models.tokenizers.templates import find_tokenizer_variables
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.speculation.drafter import HeadDrafter
from cortexmlx.stats import HostStats, ModelInfo, TimedChoice
from cortexmlx.types.embeddings import EmbeddingInfo
from cortexmlx.types.images import ImageWriter
from cortexmlx.vision.sight import Sight

Call = Callable[[Any], None]
"""Something to be done with an engine's core between two steps."""


class AttentionInUse(Protocol):
    """What the engine needs of the attention backend in use."""

    def describe(self) -> str:
        """Return the backend's name, its kernels and its notes in one line."""

    @property
    def notes(self) -> Callable[[], tuple[str, ...]]:
        """A function that returns what is computed by the reference path instead of a kernel, and why."""

    @property
    def reconsider(self) -> Callable[[], None]:
        """A function to call after a failed step, so that the backend checks its kernels again."""


class EngineModel(Protocol):
    """A loaded model that an engine runs, in this process or on hosts. Only `restart_workers` may be
    called on other threads than the engine's."""

    loaded: LoadedModel
    info: ModelInfo
    runner: Runner
    disk: StoreConnector | None
    choices: tuple[TimedChoice, ...]
    """What was chosen to compute attention, and why. Empty where the rules choose everything."""
    blocks: GroupCounts
    """How many blocks each layer group may have at most."""

    embedding: EmbeddingSupport
    """How it embeds texts and judges documents, or why not."""

    @property
    def hosts(self) -> tuple[HostStats, ...]:
        """The workers that hold parts of the model. Empty if it is in this process."""

    @property
    def draft(self) -> EngineModel | None:
        """The draft model; None if there is none, or if this model cannot use it."""

    @property
    def sight(self) -> Sight | None:
        """The vision tower and its features of images; None if the model reads text only."""

    @property
    def images(self) -> ImageWriter | None:
        """The preprocessor of images in chat messages; None if the model reads text only."""

    def make_head_drafter(self, scheduler: Scheduler) -> HeadDrafter | None:
        """Return the drafter that uses the model's own draft head or its assistant; None if it has neither."""

    @property
    def backend(self) -> AttentionInUse:
        """The attention backend in use."""

    def make_cache(self, blocks: GroupCounts, from_scratch: bool = False) -> KVCache:
        """Make an empty KV cache and arena of at most `blocks` blocks in each group. Raises MemoryRefused, unless
        `from_scratch`: then the next step makes the arena.
        """

    def make_scheduler(self, cache: KVCache) -> Scheduler:
        """Return a scheduler for this model, without requests."""

    def start_store(self) -> None:
        """Let the store read and write, once the first cache exists."""

    def restart_workers(self) -> None:
        """Start all workers anew, if the model is on hosts. `reset` must follow. It takes long: any thread may call
        it. Raises HostLost and HostRefused.
        """

    def reset(self) -> None:
        """Drop everything but the weights, after an exception at an unknown place. `make_cache` must follow."""

    def adapter_set(self) -> AdapterSet:
        """Return the set of adapters for requests, empty at first. Raises AdapterRefused if the model can have none."""

    def check_pins(self) -> None:
        """Raise InvalidRequest if this model cannot keep pinned texts."""

    def release(self) -> None:
        """Free everything, or end the workers. Safe to call again."""


def scheduler_config(config: EngineConfig, load: ArenaDemand, context: int, vocab_size: int) -> SchedulerConfig:
    """Return the scheduler's limits and rules, for a model with a context of `context` tokens."""
    return SchedulerConfig(
        max_rows=config.max_rows,
        prefill_budget=load.prefill_budget,
        lone_prefill_budget=load.lone_prefill_budget,
        context_length=context,
        vocab_size=vocab_size,
        max_request_tokens=config.max_request_tokens,
        client_tokens=config.client_tokens,
        token_target=config.token_target,
        keep=config.keep,
        pipeline=config.pipeline,
        share_prefixes=config.prefix_cache,
        share_between_clients=config.share_prefixes_between_clients,
    )


def model_info(
    loaded: LoadedModel,
    vocab_size: int,
    kv_bytes_per_token: int,
    notes: tuple[str, ...],
    draft: ModelInfo | None = None,
    embedding: EmbeddingInfo | None = None,
) -> ModelInfo:
    """Return the ModelInfo that apps see of a loaded model."""
    variables = _template_vars(loaded)
    return ModelInfo(
        name=loaded.name,
        path=str(loaded.path),
        architecture=str(loaded.config.get("model_type", "unknown")),
        context_length=loaded.context_length,
        vocab_size=vocab_size,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=loaded.dtype,
        kv_bytes_per_token=kv_bytes_per_token,
        chat_template=bool(loaded.tokenizer.has_chat_template),
        notes=notes,
        adapter=None if loaded.adapter is None else str(loaded.adapter),
        identity=loaded.identity,
        template_vars=variables or (),
        template_code=variables is None,
        sampling=tuple(loaded.sampling.items()),
        draft=draft,
        embedding=embedding,
    )


def check_prefix_cache(config: EngineConfig) -> None:
    """Raise InvalidRequest if the engine has no prefix cache, so that no text can be pinned."""
    if not config.prefix_cache:
        raise InvalidRequest("the engine computes every prompt anew (prefix_cache=False): there is nothing to pin")


def _template_vars(loaded: LoadedModel) -> tuple[str, ...] | None:
    """Return the variables that the chat template reads; None: unknown. Only rendering reports a broken template."""
    try:
        names = find_tokenizer_variables(loaded.tokenizer)
    except InvalidRequest:
        return ()
    return None if names is None else tuple(sorted(names))
