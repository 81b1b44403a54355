"""What the engine's core asks of a model, whether its weights are in this process or on hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.embedding_support import EmbeddingSupport
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.errors import InvalidRequest
from cortexmlx.execution.boundary import AdapterTables, Runner
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import Counts
from cortexmlx.models import LoadedModel
from cortexmlx.models.tokenizers.templates import variables_read
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.stats import HostStats, ModelInfo, TimedChoice
from cortexmlx.types.embeddings import EmbeddingInfo

Call = Callable[[Any], None]
"""Something to be done with an engine's core between two steps."""


class AttentionInUse(Protocol):
    """What computes attention, in words."""

    def describe(self) -> str:
        """Return its name, its kernels and its notes in one line."""

    @property
    def notes(self) -> Callable[[], tuple[str, ...]]:
        """Returns what takes the reference path, and why."""

    @property
    def reconsider(self) -> Callable[[], None]:
        """Called after a step that failed."""


class ServedModel(Protocol):
    """A model that is ready to be served. Only the engine's thread may use it."""

    loaded: LoadedModel
    info: ModelInfo
    runner: Runner
    disk: StoreConnector | None
    choices: tuple[TimedChoice, ...]
    """What was chosen to compute attention, and why. Empty where the rules choose everything."""
    blocks: Counts
    """How many blocks each layer group may have at most."""

    embedding: EmbeddingSupport
    """How it embeds texts and judges documents, or why not."""

    @property
    def hosts(self) -> tuple[HostStats, ...]:
        """The workers that have its parts. Empty if the model is in this process."""

    @property
    def draft(self) -> ServedModel | None:
        """The draft model, if there is one that is of use."""

    @property
    def backend(self) -> AttentionInUse:
        """What computes attention."""

    def begin_cache(self, blocks: Counts, anew: bool = False) -> KVCache:
        """Begin an empty arena of at most `blocks` blocks in each group. Return the owner of these blocks. Raises
        MemoryRefused, unless it begins `anew`: then the next step has the arena made.
        """

    def begin_scheduler(self, cache: KVCache) -> Scheduler:
        """Return a scheduler without requests."""

    def begin_store(self) -> None:
        """Let the store read and write, once the first cache has begun."""

    def reopen(self) -> None:
        """Start all workers anew, if the model is in workers. `begin_anew` must follow. It takes long: any thread may
        call it. Raises HostLost and HostRefused.
        """

    def begin_anew(self) -> None:
        """Forget everything but the model, since an exception may have landed anywhere. `begin_cache` must follow."""

    def adapters(self) -> AdapterTables:
        """Return the model's adapters, of which there are none at first. Raises AdapterRefused if it cannot have any
        per request.
        """

    def check_pins(self) -> None:
        """Raise InvalidRequest if pinning a text is useless here."""

    def release(self) -> None:
        """Free everything. Safe to call again."""


def scheduling_of(config: EngineConfig, context: int, vocab_size: int) -> SchedulerConfig:
    """Return the bounds and rules of a scheduler for a model with a context of `context` tokens."""
    return SchedulerConfig(
        max_rows=config.max_rows,
        prefill_budget=config.prefill_budget,
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


def described(
    loaded: LoadedModel,
    vocab_size: int,
    kv_bytes_per_token: int,
    notes: tuple[str, ...],
    draft: ModelInfo | None = None,
    embedding: EmbeddingInfo | None = None,
) -> ModelInfo:
    """Return what an app sees of a model."""
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
    """Raise InvalidRequest if there is no prefix cache to pin a text in."""
    if not config.prefix_cache:
        raise InvalidRequest("the engine computes every prompt anew (prefix_cache=False): there is nothing to pin")


def _template_vars(loaded: LoadedModel) -> tuple[str, ...] | None:
    """Return the variables that the chat template reads; None: they are not known. A broken template is reported when
    messages are rendered.
    """
    try:
        names = variables_read(loaded.tokenizer)
    except InvalidRequest:
        return ()
    return None if names is None else tuple(sorted(names))
