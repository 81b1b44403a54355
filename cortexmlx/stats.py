"""The frozen data that `engine.stats()`, `engine.blocks()` and `engine.info` return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from cortexmlx.types.embeddings import EmbeddingInfo
from cortexmlx.types.request import RequestState

__all__ = [
    "ArenaWrites",
    "BlockMap",
    "BlockState",
    "ChoiceSource",
    "CommandBuffers",
    "DraftStats",
    "EngineStats",
    "GroupBlocks",
    "HostStats",
    "Latency",
    "MemoryPressure",
    "ModelInfo",
    "RequestStats",
    "SpeculationStats",
    "StoreState",
    "StoreStats",
    "TimedChoice",
    "UsageSample",
]


class MemoryPressure(str, Enum):
    """How short of memory the system is: the levels that macOS reports."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True)
class ModelInfo:
    """What is known of the loaded model: its name, size, context and notes."""

    name: str
    path: str
    architecture: str
    context_length: int
    vocab_size: int
    parameters: int
    weight_bytes: int
    """Bytes in memory, as for `kv_bytes_per_token`."""
    dtype: str
    kv_bytes_per_token: int
    chat_template: bool
    """Whether messages can be rendered."""
    notes: tuple[str, ...] = ()
    """What was done to the weights, and what does not work."""
    adapter: str | None = None
    """The folder of the adapter that is part of it."""
    identity: str = ""
    """Names the content of the files from which it was read, wherever they are."""
    template_vars: tuple[str, ...] = ()
    """The variables that its chat template reads. A template that is code has none that are known."""
    template_code: bool = False
    """Whether Python code of mlx-lm renders messages."""
    sampling: tuple[tuple[str, float], ...] = ()
    """Values of `SamplingParams` that the model's makers recommend. The engine does not use them by itself."""
    draft: ModelInfo | None = None
    """The model that drafts for it."""
    embedding: EmbeddingInfo | None = None
    """How it makes embeddings; None: its files say nothing of them."""

    @property
    def why_no_chat(self) -> str:
        """Why the model answers no messages; empty if it answers them."""
        if self.embedding is None:
            return ""
        return "this is an embedding model: it turns texts into vectors, and answers nothing. Take a chat model"

    @property
    def known_vars(self) -> frozenset[str] | None:
        """The variables that the chat template reads, by name; None: they are not known."""
        return None if self.template_code else frozenset(self.template_vars)


@dataclass(frozen=True)
class Latency:
    """Statistics of durations, in seconds. `count` counts all; the other fields are of the newest durations."""

    count: int
    mean: float
    p50: float
    """The median."""
    p99: float
    """The 99th percentile."""
    longest: float


@dataclass(frozen=True)
class UsageSample:
    """How full the engine was `seconds` after it began. Blocks are counted as in `EngineStats`."""

    seconds: float
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    rows_running: int
    rows_waiting: int


@dataclass(frozen=True)
class DraftStats:
    """How many drafted tokens of one source were verified, and how many of them were accepted."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class SpeculationStats:
    """How many drafted tokens were verified and accepted, in total and by source: see docs/speculation.md."""

    drafted: int = 0
    accepted: int = 0
    """Those of them that were right. Each saved a step of its row."""
    verified: int = 0
    """How often a row's drafts were verified, all tokens of a step at once."""
    sources: Mapping[str, DraftStats] = field(default_factory=dict)
    """By where the drafts come from: "suffix" (repeated text), "forced" (tokens that a form leaves no choice in),
    "head" (the model's own draft head), "assistant", "model" (a draft model).
    """

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row got from a step that verified its drafts, on average; 1 if there was none."""
        return 1 + self.accepted / self.verified if self.verified else 1.0


class BlockState(IntEnum):
    """The state of a KV block: who uses it."""

    FREE = 0
    """Nobody."""
    PRIVATE = 1
    """One running request."""
    SHARED = 2
    """Several running requests."""
    CACHED = 3
    """Nobody, but its content can be used again."""
    STORED = 4
    """As CACHED, and its content is also on disk, or on its way there."""


@dataclass(frozen=True)
class GroupBlocks:
    """The KV blocks of one layer group, whose layers share block tables."""

    layers: int
    window: int | None
    """How many of the newest tokens these layers see; None: all."""
    block_bytes: int
    """Bytes of a block."""
    limit: int
    """How many blocks there may be."""
    states: bytes = field(repr=False)
    """One byte per block, its BlockState, in the order in which the blocks are in memory."""

    def count(self, state: BlockState) -> int:
        """Return how many blocks are in a state."""
        return self.states.count(state)


@dataclass(frozen=True)
class BlockMap:
    """The blocks of the arena at this moment, by layer group. A block has `block_size` tokens.

    The counts over all groups are those of `EngineStats`: `used_blocks` are private and shared, `cached_blocks` are
    cached and stored, and `free_blocks` are all but the used ones.
    """

    block_size: int
    groups: tuple[GroupBlocks, ...]

    def count(self, state: BlockState) -> int:
        """Return how many blocks of all groups are in a state."""
        return sum(group.count(state) for group in self.groups)

    @property
    def total(self) -> int:
        """How many blocks all groups have."""
        return sum(len(group.states) for group in self.groups)


@dataclass(frozen=True)
class ArenaWrites:
    """How many writes to the KV cache were measured, and how many copied a whole array, which MLX should not do: see
    docs/memory.md. The first writes are measured, and those after the cache grew. Each array counts as a write.
    """

    measured: int = 0
    copied: int = 0
    """Writes for which MLX copied the whole array."""
    copied_bytes: int = 0
    """Bytes of these arrays."""


@dataclass(frozen=True)
class CommandBuffers:
    """How many command buffers a decode step takes on a Mac's GPU: computed, not measured (see docs/python.md)."""

    per_step: int
    """Command buffers of a step, about."""
    max_operations: int
    """MLX commits a command buffer when it has more kernels than this,"""
    max_elements: int
    """or when it uses arrays of more elements than this, in Mi."""
    run_ahead: float
    """The share of a step that MLX queues for the GPU before it makes the engine wait, 0 to 1."""

    @property
    def may_idle(self) -> bool:
        """Whether the GPU may idle between two decode steps, since MLX queues less than a step at once."""
        return self.run_ahead < 1


@dataclass(frozen=True)
class HostStats:
    """A worker that holds a part of the model: see docs/hosts.md."""

    name: str
    weight_bytes: int
    """Bytes of its weights."""
    kv_bytes: int
    """Bytes of its arena now."""
    active_memory: int
    """Bytes that MLX has allocated there, weights and arena included."""


class StoreState(str, Enum):
    """Whether an engine reads and writes its disk store now."""

    HASHING = "hashing"
    """Not yet, since the hash of the weights is not known."""
    OPEN = "open"
    """It does."""
    OFF = "off"
    """Not at all, since there is no such hash. A warning said why."""


@dataclass(frozen=True)
class StoreStats:
    """Counters of the disk tier in `path` since the engine began. A block of each layer group counts as one, and so
    does a recurrent state."""

    path: str
    bytes_limit: int
    """Bytes that the folder may have."""
    stored_blocks: int
    """Blocks that were written."""
    stored_bytes: int
    dropped_blocks: int
    """Blocks that were not written: too late, or refused by the disk."""
    read_blocks: int
    """Blocks that were read."""
    read_bytes: int
    missed_blocks: int
    """Blocks that were requested and could not be read."""
    state: StoreState = StoreState.OPEN
    hashed: float = 1.0
    """While `state` is HASHING: the part of the weights' bytes that is hashed, 0 to 1."""


@dataclass(frozen=True)
class RequestStats:
    """The state and token counts of one answer that runs or waits. Neither the text nor who asked is in it."""

    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache."""
    computed_tokens: int
    """Tokens of prompt and answer whose keys and values are computed, cached ones included."""
    generated_tokens: int
    max_tokens: int
    """How many tokens the answer may have."""
    preemptions: int


class ChoiceSource(str, Enum):
    """Where the choice of an implementation comes from."""

    TIMED = "timed"
    """The candidates were timed at this opening."""
    DISK = "disk"
    """They were timed earlier."""
    RULE = "rule"
    """They were not timed, since there is one only, or no time was left. They are timed next time."""
    FIXED = "fixed"
    """They are not timed, so that one choice serves all classes (`reproducible`)."""


@dataclass(frozen=True)
class TimedChoice:
    """Which implementation computes a job (attention or a matrix product), and why."""

    job: str
    """What is computed."""
    batch: str
    """For which rows and lengths."""
    chosen: str
    source: ChoiceSource
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The median time of each candidate that can serve, for computing the job once."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The candidates that cannot serve, and why."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine began (or began again, see docs/python.md), and values of this moment. Blocks are
    summed over layer groups. Times are in seconds.

    A step's time has four parts: `plan` (scheduling), `build` (making the graph and giving it to the device), `wait`
    (for the device) and `commit` (taking the tokens, detokenizing).
    """

    rows_running: int
    rows_waiting: int
    max_rows: int
    block_size: int
    kv_bits: int | None
    """Bits of a key's or value's numbers; None: those of the model's dtype."""
    kv_group_size: int | None
    """Numbers that share a scale and a bias, with `kv_bits`."""
    total_blocks: int
    free_blocks: int
    """Blocks that belong to no request."""
    used_blocks: int
    """Blocks of running requests."""
    shared_blocks: int
    """Those of them that belong to several requests."""
    cached_blocks: int
    """Free blocks whose content can be used again."""
    fragmentation: float
    single_run_share: float
    """The share of running rows whose blocks are one run."""
    kv_bytes: int
    """Bytes of the arena now."""
    kv_bytes_limit: int
    """Bytes to which it may grow."""
    kv_bytes_in_use: int
    """Bytes of the arena and of the rows' tails that hold tokens of running requests."""
    state_bytes: int
    """Bytes of the recurrent layers' states, beside the arena: those of running rows and those of snapshots."""
    state_snapshots: int
    """Snapshots of beginnings that can be used again."""
    adapters: int
    """Adapters that requests can name, or that running requests still have."""
    adapter_bytes: int
    adapter_bytes_limit: int
    pins: int
    pinned_blocks: int
    """Used and cached blocks that `pins` hold."""
    steps: int
    prompt_tokens: int
    """Tokens of the prompts that began."""
    generated_tokens: int
    requests_finished: int
    cached_tokens: int
    """Tokens of the prompts that were found in the prefix cache."""
    prefilled_tokens: int
    """Tokens of the prompts that steps have computed, also anew."""
    steps_by_reason: Mapping[str, int]
    """Steps that ran ahead of the one in flight ("ahead"), and by reason those that could not."""
    speculation: SpeculationStats
    """Drafted tokens, and how many of them were right."""
    preemptions: int
    """How often a running request lost its row and blocks to another."""
    restarts: int
    """How many requests began again because a step was refused memory."""
    keep_first: int | None
    """With `keep_last`: tokens at the beginning that each row keeps; None: rows keep all tokens."""
    keep_last: int | None
    """The newest tokens that each row keeps at least."""
    dropped_tokens: int
    """Tokens that rows have dropped so far."""
    queued: Latency
    time_to_first_token: Latency
    inter_token: Latency
    tokens_per_second: float
    """Generated tokens per second while the engine had work."""
    plan_seconds: float
    build_seconds: float
    wait_seconds: float
    commit_seconds: float
    mask_seconds: float
    """Making the masks of answers that follow a grammar."""
    attention_backend: str
    """One line about what computes attention."""
    attention_notes: tuple[str, ...]
    """What takes the reference path instead of kernels, each with its whole reason and every line of a compiler's
    message.
    """
    active_memory: int
    peak_memory: int
    arena_writes: ArenaWrites
    """Whether MLX writes the KV cache in place."""
    command_buffers: CommandBuffers | None
    """How a decode step is handed to the GPU. None without one, and for a model that runs one request at a time."""
    kv_store: StoreStats | None
    """The disk tier, if there is one."""
    timeline: tuple[UsageSample, ...] = field(repr=False)
    """How the blocks were used from the engine's beginning to now, in evenly spaced samples while it had work."""
    sequences: tuple[str, ...]
    """A line about each answer that runs or waits."""
    requests: tuple[RequestStats, ...] = field(repr=False)
    """The same answers as numbers, in the same order."""
    choices: tuple[TimedChoice, ...] = field(default=(), repr=False)
    """What computes each kind of work, where there are several candidates. Empty if the rules choose everything."""
    draft_kv_bytes: int = 0
    """Bytes of the draft model's arena now."""
    hosts: tuple[HostStats, ...] = ()
    """The workers, with `hosts`."""
    recomputed_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that were computed again although the client's earlier prompts had them, by `RecomputeReason`."""
    host_losses: int = 0
    """How often a worker was lost, and all were started anew."""

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
