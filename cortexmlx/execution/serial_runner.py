"""SerialRunner: runs plans of one row with mlx-lm's own caches. Only the engine's thread may call it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention.mlx_lm_hook import flatten_caches, make_mlx_lm_caches
from cortexmlx.disk.tier import DiskLoad
from cortexmlx.errors import KVBlockError
from cortexmlx.execution.boundary import MemoryInUse, StepResult, TokenMask, TokenScores, return_refusals
from cortexmlx.execution.prompt_scores import PromptResults, rows_at_once, score_tokens
from cortexmlx.execution.sampling import BatchSampler, PendingStep, SampledTokens, read_result
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixMatch
from cortexmlx.kv.sizing import sequence_bytes
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import GroupCounts, KVSpec, LayerGroup, group_layers
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan
from cortexmlx.system.machine import can_allocate
from cortexmlx.types.arrays import dtype_name
from cortexmlx.types.sampling_params import LogitsProcessor

P = ParamSpec("P")
T = TypeVar("T")

_CLEAR_INTERVAL = 256
"""After this many tokens, mlx-lm's buffers have been replaced by longer ones, and MLX would keep the memory of the old
ones.
"""


def _empty_caches_on_failure(
    work: Callable[Concatenate[SerialRunner, P], T],
) -> Callable[Concatenate[SerialRunner, P], T]:
    """Decorate `work` so that the caches are emptied if it fails."""

    @wraps(work)
    def run_or_empty_caches(self: SerialRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(self, *args, **kwargs)
        except Exception:
            self.arena.rewind(0)
            raise

    return run_or_empty_caches


class SerialRunner:
    """Runs planned steps of a single row on mlx-lm's own caches, as mlx-lm's `generate_step` does. Prompts are
    computed in pieces `[1, count]`. The last token of a prompt is a pass of its own, because only its logits are
    wanted. Further tokens are `[1, 1]`. Tokens to be scored take one pass per few tokens, to bound the logits' memory.
    """

    def __init__(self, model: nn.Module, groups: Sequence[LayerGroup], block_size: int, vocab_size: int) -> None:
        self.arena = SequenceCaches(model, groups, block_size)
        self._model = model
        self.computes_at_dispatch = mx.default_device() == mx.cpu
        self.build_seconds = 0.0
        self.wait_seconds = 0.0
        self.processors: MutableMapping[JobId, Sequence[LogitsProcessor]] = {}
        self._vocab_size = vocab_size
        self._sampler: BatchSampler | None = None
        self._started = 0.0
        self._plan: StepPlan | None = None
        self._logits: mx.array | None = None
        self._scores: TokenScores | None = None
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._last_sampled: SampledTokens | None = None

    def close(self) -> None:
        """Free the model and the caches. The runner cannot be used afterwards. Safe to call again."""
        if vars(self):
            self.arena.close()
            vars(self).clear()

    # -- memory: blocks only count tokens -----------------------------------------------------------------------------

    @property
    def blocks(self) -> GroupCounts:
        """How many blocks the caches may fill. Blocks only count tokens here."""
        return self.arena.blocks

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes in use now. The whole row counts as tail, since nothing is in blocks."""
        cache_bytes = self.arena.nbytes
        return MemoryInUse(cache_bytes, cache_bytes, 0, mx.get_active_memory(), mx.get_peak_memory())

    @property
    def command_buffers(self) -> None:
        """Always None: they are not known for mlx-lm's own caches."""
        return None

    def begin(self, blocks: GroupCounts) -> None:
        """Begin with new, empty caches that may fill `blocks` blocks."""
        self.arena = SequenceCaches(self._model, self.arena.groups, self.arena.block_size)
        self.arena.resize(blocks)

    def rewind(self, tokens: int) -> bool:
        """Cut the caches back to the first `tokens` tokens: see `SequenceCaches.rewind`."""
        return self.arena.rewind(tokens)

    def can_resize(self, blocks: GroupCounts) -> bool:
        """Return whether the system would give the memory now."""
        return self.arena.can_resize(blocks)

    def resize(self, blocks: GroupCounts) -> None:
        """Let the caches fill up to `blocks` blocks."""
        self.arena.resize(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Do nothing, since nothing is stored in blocks."""

    def release(self) -> None:
        """Empty the caches, and free their memory."""
        self.arena.rewind(0)
        self.trim()

    def trim(self) -> None:
        """Free the memory that MLX keeps for reuse after arrays are deleted."""
        mx.clear_cache()

    # -- steps --------------------------------------------------------------------------------------------------------

    @return_refusals
    @_empty_caches_on_failure
    def dispatch(self, plan: StepPlan) -> None:
        """Build and start one step; see `ModelRunner.dispatch`. Raises KVBlockError if the caches do not end where the
        step begins. Whatever it raises, the caches are emptied.
        """
        started = time.perf_counter()
        self._start_evaluation(self._begin_pass(plan) + self._begin_choice(None), started)

    @return_refusals
    @_empty_caches_on_failure
    def forward(self, plan: StepPlan) -> None:
        """Build and start the forward pass of a step."""
        started = time.perf_counter()
        results = self._begin_pass(plan)
        self._start_evaluation(results if self._logits is None else [*results, self._logits], started)

    @return_refusals
    @_empty_caches_on_failure
    def choose(self, mask: TokenMask | None = None) -> None:
        """Build the graph that samples the step's token, allowed by `mask`, and start to compute it."""
        started = time.perf_counter()
        self._start_evaluation(self._begin_choice(mask), started)

    def _start_evaluation(self, results: list[mx.array], started: float) -> None:
        """Start to compute the `results` of a graph that was begun at `started`."""
        built = time.perf_counter()
        mx.async_eval(results)  # type: ignore[no-untyped-call]
        self.build_seconds += built - started
        self.wait_seconds += time.perf_counter() - built

    def _begin_pass(self, plan: StepPlan) -> list[mx.array]:
        """Build the forward pass of a step as a graph. Return the arrays to compute."""
        self._started, self._plan, self._logits, self._scores = time.perf_counter(), plan, None, None
        if plan.blocks != self.arena.blocks:
            self.arena.resize(plan.blocks)
        if plan.kind is StepKind.FLUSH:
            return []
        (segment,) = plan.segments
        self._logits, self._scores = self._forward(plan, segment)
        return self.arena.arrays() if plan.kind is StepKind.MIXED else []

    def _begin_choice(self, mask: TokenMask | None) -> list[mx.array]:
        """Build the graph that samples the step's token. The step is in flight from now on."""
        plan, logits, scores = self._plan, self._logits, self._scores
        assert plan is not None
        sampled_tokens = None
        if plan.sampling:
            self._sampler = BatchSampler(plan.sampling, self._vocab_size, self.processors)
        if logits is not None:
            assert self._sampler is not None
            sampled_tokens = self._sampler(logits, plan.token_index, [plan.segments[0].live], mask)
        self._last_sampled, self._logits, self._scores = sampled_tokens, None, None
        pending = PendingStep(sampled_tokens, self._started, None if scores is None else lambda: PromptResults(scores))
        self._in_flight.append((plan, pending))
        return [] if sampled_tokens is None else sampled_tokens.arrays()

    @return_refusals
    @_empty_caches_on_failure
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, and bring its results to the host. If it failed, empty the caches."""
        started = time.perf_counter()
        plan, pending = self._in_flight.popleft()
        if plan.kind is StepKind.MIXED:
            mx.eval(self.arena.arrays())
        result = read_result(pending)
        if any((s.first + s.count) % _CLEAR_INTERVAL == 0 or s.count > 1 for s in plan.segments):
            mx.clear_cache()
        self.wait_seconds += time.perf_counter() - started
        return result

    def reset(self) -> None:
        """Drop the data of the last step. The caches keep their content, since the next prompt may begin with it."""
        self._last_sampled = self._sampler = self._plan = self._logits = self._scores = None

    def forget(self) -> None:
        """Drop everything after a step that failed, the content of the caches included."""
        self._in_flight.clear()
        self.reset()
        self.arena.rewind(0)

    def settle(self, ops: StateOps) -> None:
        """Call `reset`. The row's recurrent state stays in mlx-lm's caches."""
        self.reset()

    def _forward(self, plan: StepPlan, segment: Segment) -> tuple[mx.array | None, TokenScores | None]:
        """Compute a segment. Return its last token's logits `[1, vocab]` if wanted, and its tokens' scores if any."""
        if segment.first != self.arena.length:
            raise KVBlockError(
                f"a step begins at token {segment.first}, but the caches have {self.arena.length}: this is a fault of "
                "the scheduler, please report it"
            )
        tokens = self._input_tokens(plan)[None]
        if plan.scoring is None:
            return self._run_tokens(tokens, bool(segment.logits)), None
        start, end = int(plan.scoring.rows[0]), int(plan.scoring.rows[-1]) + 1
        if start:
            self.arena.run(tokens[:, :start])
        logits: list[mx.array] = []

        def compute_logits(part: slice) -> mx.array:
            logits[:] = [self.arena.run(tokens[:, start:end][:, part])]
            return logits[0][0]

        scores = score_tokens(compute_logits, plan.scoring.tokens, plan.scoring.top, rows_at_once(self._vocab_size))
        if end < segment.count:
            return self._run_tokens(tokens[:, end:], bool(segment.logits)), scores
        return logits[0][:, -1] if bool(segment.logits) else None, scores

    def _run_tokens(self, tokens: mx.array, needs_logits: bool) -> mx.array | None:
        """Run the model over tokens `[1, count]`. Return the last token's logits, if they are needed."""
        if not needs_logits:
            self.arena.run(tokens)
            return None
        if tokens.shape[1] > 1:
            self.arena.run(tokens[:, :-1])
        return self.arena.run(tokens[:, -1:])[:, -1]

    def _input_tokens(self, plan: StepPlan) -> mx.array:
        """Return a step's input tokens: those of the plan, or the newest sampled one."""
        if plan.tokens is not None:
            return mx.array(plan.tokens)
        assert self._last_sampled is not None
        return self._last_sampled.tokens


# mlx-lm's own caches in place of an arena: their size, and how far they can be cut back.


_EXACTLY_TRIMMABLE = (PlainCache, RotatingKVCache)
"""The classes whose caches are exact after `trim`, if they say that they can be trimmed. Others that say so are not:
one forgets the length and keeps the tokens, another has dropped the tokens of the chunk before.
"""

_GROWTH_TOKENS = 256
"""By how many tokens a cache of unknown kind is grown to measure its size: a step of mlx-lm's buffers."""

_PROBE_TOKENS = 8
"""Tokens of a prompt whose first token must not see the others."""

_MAX_ROUNDING = 0.5
"""How much two computations of the same logits may differ, as a part of how much these differ from each other."""

_SPARE_BYTES = 64 << 20
"""Bytes that must be left for a step when the caches grow."""


class SequenceCaches:
    """mlx-lm's own caches of the one sequence that runs, or ran last: its first `length` tokens.

    To the engine this is an arena of `blocks` blocks of `block_size` tokens, but the blocks only count tokens. Nothing
    is allocated beforehand. mlx-lm's buffers grow with the sequence, by up to 256 tokens at a time, and `groups` say
    how many bytes a token takes.
    """

    def __init__(self, model: nn.Module, groups: Sequence[LayerGroup], block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks: GroupCounts = (0,)
        self.length = 0
        self._model = model
        self._caches: list[Any] = make_prompt_cache(model)

    def run(self, tokens: mx.array) -> mx.array:
        """Run the model over the next tokens `[1, count]`, which the caches keep. Return logits `[1, count, vocab]`."""
        logits: mx.array = self._model(tokens, cache=self._caches)
        self.length += tokens.shape[1]
        return logits

    def rewind(self, tokens: int) -> bool:
        """Cut the caches back to the first `tokens` tokens. To 0 this always works; otherwise only if the result is
        exact. Return False if it would not be; then nothing has changed.
        """
        surplus = self.length - tokens
        if not tokens:
            self._caches, self.length = make_prompt_cache(self._model), 0
        elif surplus:
            leaves = flatten_caches(self._caches)
            if surplus < 0 or not all(type(leaf) in _EXACTLY_TRIMMABLE and leaf.is_trimmable() for leaf in leaves):
                return False
            for leaf in leaves:
                leaf.trim(surplus)
            self.length = tokens
        return True

    # -- as an arena --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the caches' buffers now."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Return all arrays of the caches, for evaluation."""
        return [array for leaf in flatten_caches(self._caches) for array in _cache_arrays(leaf)]

    def can_resize(self, blocks: GroupCounts) -> bool:
        """Return whether the system would now give the memory for a sequence of `blocks` blocks."""
        required_bytes = sequence_bytes(self.groups, blocks[0] * self.block_size)
        return can_allocate(max(required_bytes - self.nbytes, 0) + _SPARE_BYTES)

    def resize(self, blocks: GroupCounts) -> None:
        """Let the caches fill up to `blocks` blocks. A longer sequence is dropped."""
        self.blocks = blocks
        if self.length > blocks[0] * self.block_size:
            self.rewind(0)

    def close(self) -> None:
        """Drop the caches and the model. It cannot be used afterwards."""
        self.__dict__.pop("_model", None)
        self._caches = []


def find_own_groups(model: nn.Module) -> tuple[LayerGroup, ...]:
    """Return the layer groups of mlx-lm's own caches, by unevaluated passes. Raises what the model's code raises."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    specs = [_cache_spec(leaf) for leaf in flatten_caches(caches)]
    if None in specs:
        initial_sizes = [_cache_bytes(leaf) for leaf in flatten_caches(caches)]
        model(mx.zeros((1, _GROWTH_TOKENS), mx.int32), cache=caches)
        measured_specs = (
            _spec_by_growth(size, _cache_bytes(leaf))
            for size, leaf in zip(initial_sizes, flatten_caches(caches), strict=True)
        )
        return group_layers(
            [known_spec or measured_spec for known_spec, measured_spec in zip(specs, measured_specs, strict=True)]
        )
    return group_layers([spec for spec in specs if spec is not None])


def sees_later_tokens(model: nn.Module) -> bool:
    """Return whether the logits of a prompt's token depend on the tokens after it. Then an answer would depend on how
    its prompt is cut. It computes two short forward passes, and raises whatever they raise.

    Differences by rounding, or by another expert chosen because of it, are far smaller than the differences among one
    token's logits.
    """
    tokens = mx.arange(_PROBE_TOKENS)[None]
    full_logits, single_logits = (
        model(t, cache=make_prompt_cache(model))[0, 0].astype(mx.float32) for t in (tokens, tokens[:, :1])
    )
    is_finite = mx.isfinite(full_logits) & mx.isfinite(single_logits)
    full_logits, single_logits = (mx.where(is_finite, logits, 0.0) for logits in (full_logits, single_logits))
    return bool(
        (
            mx.linalg.norm(full_logits - single_logits)
            > _MAX_ROUNDING * mx.linalg.norm(single_logits - mx.mean(single_logits))
        ).item()
    )


def untrimmable_caches(model: nn.Module) -> list[str]:
    """Return the class names of a model's caches that cannot always be cut back: some cannot once a window is full."""
    return sorted({type(leaf).__name__ for leaf in make_mlx_lm_caches(model) if type(leaf) is not PlainCache})


def _cache_spec(leaf: Any) -> KVSpec | None:
    """Return a cache's spec if it has keys and values `[1, heads, tokens, dim]` or arrays of fixed size; else None."""
    if isinstance(leaf, ArraysCache):
        return KVSpec(0, 0, 0, "float32", row_bytes=_cache_bytes(leaf))
    keys, values = getattr(leaf, "keys", None), getattr(leaf, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return None
    dtype = dtype_name(keys.dtype)
    return KVSpec(keys.shape[1], keys.shape[-1], values.shape[-1], dtype, getattr(leaf, "max_size", None))


def _spec_by_growth(initial_size: int, grown_size: int) -> KVSpec:
    """Estimate an unknown cache's spec, as float16, from its bytes at one token and after `_GROWTH_TOKENS` more."""
    numbers = -(-(grown_size - initial_size) // (2 * _GROWTH_TOKENS))
    return KVSpec(1 if numbers else 0, numbers, 0, "float16", row_bytes=max(initial_size - 2 * numbers, 0))


def _cache_bytes(leaf: Any) -> int:
    """Return the bytes of one of mlx-lm's caches."""
    return sum(array.nbytes for array in _cache_arrays(leaf))


def _cache_arrays(leaf: Any) -> list[mx.array]:
    """Return the arrays of one of mlx-lm's caches."""
    return [part for _, part in tree_flatten(leaf.state) if isinstance(part, mx.array)]


# A KVCache of one sequence whose keys and values are in mlx-lm's own caches.


COUNTING_GROUPS = (LayerGroup(KVSpec(0, 0, 0, "float32"), ()),)
"""The one group of its pools. Its blocks take no memory: they only count tokens."""


class SingleSequenceCache(KVCache):
    """A `KVCache` for one sequence at a time. Its blocks only count tokens; the keys and values are in mlx-lm's
    caches.

    Only the last sequence is kept, and a new one that begins like it takes it over. `rewind(tokens)` cuts mlx-lm's
    caches back to the first `tokens` tokens, or returns False if they cannot be cut. Then the new sequence begins
    empty. `rewind(0)` empties the caches. `layer_groups` is what the model's layers keep, and `pools` have the group
    `COUNTING_GROUPS`.
    """

    def __init__(self, layer_groups: Sequence[LayerGroup], pools: BlockPools, rewind: Callable[[int], bool]) -> None:
        super().__init__(pools)
        self.has_states, self.can_take_back_drafts = True, False  # not all caches can be
        self._layer_groups = tuple(layer_groups)
        self._rewind = rewind

    @property
    def uses_token_memory(self) -> bool:
        """Always True: mlx-lm's caches take memory for every token."""
        return True

    @property
    def bytes_limit(self) -> int:
        """Bytes of the longest sequence."""
        return sequence_bytes(self._layer_groups, self.tables.capacity_tokens)

    def allocate_for(
        self,
        seq: int,
        tokens: int,
        headroom: int = 0,
        match: PrefixMatch | None = None,
        load: DiskLoad | None = None,
        transient: bool = False,
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence that replaces the last one, with the tokens of `match` that mlx-lm's caches can keep.

        Nothing is copied. Raises KVCacheFull; then the caches have not changed.
        """
        super().allocate_for(seq, tokens, headroom, match)
        self.release_copy_sources()  # nothing is copied, and a held source would stay cached after its text is gone
        if not self._rewind(self.tables.length(seq)):
            assert match is not None
            self.free(seq)
            self._rewind(0)
            super().allocate_for(seq, tokens, headroom, replace(match, entries=(), partial=None, partial_tokens=0))
        self.pools.drop_cached()
        return ()
