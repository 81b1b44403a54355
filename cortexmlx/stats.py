"""The frozen data that `engine.stats()`, `engine.blocks()` and `engine.info` return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum


class MemoryPressure(str, Enum):
    """How short of memory the system is; the levels that macOS reports."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True)
class ModelInfo:
    """The loaded model. `weight_bytes` and `kv_bytes_per_token` are bytes in memory; `chat_template`
    says whether messages can be rendered; `notes` say what was done to the weights; `adapter` is the folder of the
    adapter in it; `identity` names the content of the files that it was read from, wherever they lie; `template_vars`
    are the variables that its chat template reads (none are known of a template that is code). `sampling` are the
    values of `SamplingParams` that the model's makers recommend; the engine does not use them unless a request does.
    """

    name: str
    path: str
    architecture: str
    context_length: int
    vocab_size: int
    parameters: int
    weight_bytes: int
    dtype: str
    kv_bytes_per_token: int
    chat_template: bool
    notes: tuple[str, ...] = ()
    adapter: str | None = None
    identity: str = ""
    template_vars: tuple[str, ...] = ()
    sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Latency:
    """A number of durations in seconds: how many in all, and the mean, median, 99th percentile and longest of the
    newest.
    """

    count: int
    mean: float
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True)
class UsageSample:
    """How full the engine was, `seconds` after it began. Blocks are counted as in `EngineStats`."""

    seconds: float
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    rows_running: int
    rows_waiting: int


class BlockState(IntEnum):
    """Whose a block of the arena is: nobody's, one running request's, several ones'. Or nobody's any more, but what it
    holds can be used again: it is CACHED, and STORED if it is on disk, too, or on its way there.
    """

    FREE = 0
    PRIVATE = 1
    SHARED = 2
    CACHED = 3
    STORED = 4


@dataclass(frozen=True)
class GroupBlocks:
    """The blocks of the `layers` layers that share block tables, which see all tokens or the `window` newest:
    `states` has one byte for each, its BlockState, in the order in which they lie in memory. A block takes
    `block_bytes` bytes; there may be `limit` blocks.
    """

    layers: int
    window: int | None
    block_bytes: int
    limit: int
    states: bytes = field(repr=False)

    def count(self, state: BlockState) -> int:
        """How many blocks are in a state."""
        return self.states.count(state)


@dataclass(frozen=True)
class BlockMap:
    """The arena at this moment, a picture for each layer group, in blocks of `block_size` tokens. The counts over all
    groups are those of `EngineStats`: its `used_blocks` are private and shared, its `cached_blocks` cached and stored,
    and its `free_blocks` all but the used ones.
    """

    block_size: int
    groups: tuple[GroupBlocks, ...]

    def count(self, state: BlockState) -> int:
        """How many blocks of all groups are in a state."""
        return sum(group.count(state) for group in self.groups)

    @property
    def total(self) -> int:
        """Blocks of all groups."""
        return sum(len(group.states) for group in self.groups)


class StoreState(str, Enum):
    """Whether an engine reads and writes its store. HASHING: not yet, since the hash of the weights is not known. OFF:
    not at all, since there is no such hash; a warning said why.
    """

    HASHING = "hashing"
    OPEN = "open"
    OFF = "off"


@dataclass(frozen=True)
class StoreStats:
    """The disk tier in the folder `path`, which takes at most `bytes_limit` bytes. Blocks of each layer group count for
    themselves, and so does a recurrent state: since the engine began `stored_blocks` were written and `read_blocks`
    read, `dropped_blocks` could not be written in time, and `missed_blocks` were looked for in vain. While `state` is
    HASHING, `hashed` of the weights' bytes are hashed (0 to 1), and nothing is read or written.
    """

    path: str
    bytes_limit: int
    stored_blocks: int
    stored_bytes: int
    dropped_blocks: int
    read_blocks: int
    read_bytes: int
    missed_blocks: int
    state: StoreState = StoreState.OPEN
    hashed: float = 1.0


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine began (or began anew, see docs/python.md) and gauges of this moment. Blocks are summed
    over layer groups; times are seconds.

    `used_blocks` belong to running requests (`shared_blocks` of them to several), `free_blocks` to nobody, but the
    content of `cached_blocks` of these may be used again. `steps_by_reason` counts the steps that ran ahead of the one
    in flight ("ahead"), and by reason those that could not. `preemptions` gave the row and blocks of a running request
    to another, `restarts` are requests that began again because a step was refused memory. `single_run_share` of the
    running rows have all their blocks in one run. `cached_tokens` of the prompts were found in the prefix cache.
    `tokens_per_second` is the rate of generated tokens while the engine had work. `timeline` tells how the blocks were
    used from the engine's beginning to now, in evenly spaced moments while it had work.

    The arena has `kv_bytes` now and grows on demand up to `kv_bytes_limit`; `kv_bytes_in_use` of it, with the tails of
    the rows, hold the tokens of running requests. Its numbers have `kv_bits` bits, with a scale and a bias for every
    `kv_group_size` of them; None: the model's dtype. Beside it `state_bytes` are the states of recurrent layers, those
    of running rows and `state_snapshots` of beginnings that can be used again. `pins` hold `pinned_blocks` of those
    used and cached. `kv_store` is the disk tier; None without one.

    With `keep_last`, rows go on without `dropped_tokens` of their texts so far, but for the `keep_first` first and at
    least the `keep_last` newest; None: they keep all.

    `attention_backend` says in a line what attention runs on; `attention_notes`, what runs on the reference path in the
    place of kernels, and the whole reason for each, with every line of a compiler's message.

    A step's time is `plan` (scheduling), `build` (making the graph and handing it to the device), `wait` (for the
    device) and `commit` (taking the tokens, detokenizing).
    """

    rows_running: int
    rows_waiting: int
    max_rows: int
    block_size: int
    kv_bits: int | None
    kv_group_size: int | None
    total_blocks: int
    free_blocks: int
    used_blocks: int
    shared_blocks: int
    cached_blocks: int
    fragmentation: float
    single_run_share: float
    kv_bytes: int
    kv_bytes_limit: int
    kv_bytes_in_use: int
    state_bytes: int
    state_snapshots: int
    pins: int
    pinned_blocks: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    requests_finished: int
    cached_tokens: int
    steps_by_reason: Mapping[str, int]
    preemptions: int
    restarts: int
    keep_first: int | None
    keep_last: int | None
    dropped_tokens: int
    queued: Latency
    time_to_first_token: Latency
    inter_token: Latency
    tokens_per_second: float
    plan_seconds: float
    build_seconds: float
    wait_seconds: float
    commit_seconds: float
    attention_backend: str
    attention_notes: tuple[str, ...]
    active_memory: int
    peak_memory: int
    kv_store: StoreStats | None
    timeline: tuple[UsageSample, ...] = field(repr=False)
    sequences: tuple[str, ...]

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that were found in the prefix cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
