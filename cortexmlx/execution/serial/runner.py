"""SerialRunner: runs plans of one row with mlx-lm's own caches. Only the engine's thread may call it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.errors import KVBlockError
from cortexmlx.execution.boundary import Arrays, MemoryInUse, Shapes, StepResult, TokenMask, TokenScores, refusable
from cortexmlx.execution.kept_states import PromptResults
from cortexmlx.execution.sampling import BatchSampler, Pending, Sampled, read
from cortexmlx.execution.scores import rows_at_once, scores_of
from cortexmlx.execution.serial.caches import OwnCaches
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan
from cortexmlx.types.sampling_params import LogitsProcessor

P = ParamSpec("P")
T = TypeVar("T")

_GROWN = 256
"""After this many tokens, mlx-lm's buffers have been replaced by longer ones, and MLX would keep the memory of the old
ones.
"""


def _or_forget(work: Callable[Concatenate[SerialRunner, P], T]) -> Callable[Concatenate[SerialRunner, P], T]:
    """Wrap `work` so that the caches keep nothing after it fails."""

    @wraps(work)
    def done(self: SerialRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(self, *args, **kwargs)
        except Exception:
            self.arena.rewind(0)
            raise

    return done


class SerialRunner:
    """Turns plans of a single row into tokens, as mlx-lm's `generate_step` does. Prompts are computed in pieces `[1,
    count]`. The last token of a prompt is a pass of its own, because only its logits are wanted. Further tokens are
    `[1, 1]`. Tokens to be scored are a pass for every few rows of logits.
    """

    def __init__(self, model: nn.Module, groups: Sequence[LayerGroup], block_size: int, vocab_size: int) -> None:
        self.arena = OwnCaches(model, groups, block_size)
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
        self._in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self._newest: Sampled | None = None

    def close(self) -> None:
        """Free the model and the caches. The runner cannot be used afterwards. Safe to call again."""
        if vars(self):
            self.arena.close()
            vars(self).clear()

    # -- memory: blocks only count tokens -----------------------------------------------------------------------------

    @property
    def blocks(self) -> Counts:
        """How many blocks the caches may fill."""
        return self.arena.blocks

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes in use now. All of a row's tokens are outside of blocks, as those of a tail."""
        kept = self.arena.nbytes
        return MemoryInUse(kept, kept, 0, mx.get_active_memory(), mx.get_peak_memory())

    @property
    def command_buffers(self) -> None:
        """They are mlx-lm's own."""
        return None

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """Nothing is stored in blocks."""
        return ()

    def begin(self, blocks: Counts) -> None:
        """Begin with new caches, which keep nothing, and count `blocks` blocks."""
        self.arena = OwnCaches(self._model, self.arena.groups, self.arena.block_size)
        self.arena.resize(blocks)

    def rewind(self, tokens: int) -> bool:
        """Cut the caches back to the first `tokens` tokens: see `OwnCaches.rewind`."""
        return self.arena.rewind(tokens)

    def can_resize(self, blocks: Counts) -> bool:
        """Return whether the system would give the memory now."""
        return self.arena.can_resize(blocks)

    def resize(self, blocks: Counts) -> None:
        """Count `blocks` blocks."""
        self.arena.resize(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Do nothing, since nothing is stored in blocks."""

    def copy_out(self, group: int, names: Sequence[int]) -> list[Arrays | None]:
        """Return nothing, since nothing is stored in blocks."""
        return []

    def release(self) -> None:
        """Drop what the caches keep."""
        self.arena.rewind(0)
        self.trim()

    def trim(self) -> None:
        """Give back the memory that MLX keeps of deleted arrays."""
        mx.clear_cache()

    # -- steps --------------------------------------------------------------------------------------------------------

    @refusable
    @_or_forget
    def dispatch(self, plan: StepPlan) -> None:
        """Build and start one step; see `ModelRunner.dispatch`. Raises KVBlockError if the caches do not end where the
        step begins. Whatever it raises, the caches are emptied.
        """
        started = time.perf_counter()
        self._start(self._pass(plan) + self._choose(None), started)

    @refusable
    @_or_forget
    def forward(self, plan: StepPlan) -> None:
        """Build and start the forward pass of a step."""
        started = time.perf_counter()
        results = self._pass(plan)
        self._start(results if self._logits is None else [*results, self._logits], started)

    @refusable
    @_or_forget
    def choose(self, mask: TokenMask | None = None) -> None:
        """Build and start the choice of the step's token."""
        started = time.perf_counter()
        self._start(self._choose(mask), started)

    def _start(self, results: list[mx.array], started: float) -> None:
        """Start to compute results. Their graph was begun at `started`."""
        built = time.perf_counter()
        mx.async_eval(results)  # type: ignore[no-untyped-call]
        self.build_seconds += built - started
        self.wait_seconds += time.perf_counter() - built

    def _pass(self, plan: StepPlan) -> list[mx.array]:
        """Build the forward pass of a step as a graph. Return the arrays to compute."""
        self._started, self._plan, self._logits, self._scores = time.perf_counter(), plan, None, None
        if plan.blocks != self.arena.blocks:
            self.arena.resize(plan.blocks)
        if plan.kind is StepKind.FLUSH:
            return []
        (segment,) = plan.segments
        self._logits, self._scores = self._forward(plan, segment)
        return self.arena.arrays() if plan.kind is StepKind.MIXED else []

    def _choose(self, mask: TokenMask | None) -> list[mx.array]:
        """Build the choice of the step's token as a graph. The step is in flight from now on."""
        plan, logits, scores = self._plan, self._logits, self._scores
        assert plan is not None
        sampled = None
        if plan.sampling:
            self._sampler = BatchSampler(plan.sampling, self._vocab_size, self.processors)
        if logits is not None:
            assert self._sampler is not None
            sampled = self._sampler(logits, plan.token_index, [plan.segments[0].live], mask)
        self._newest, self._logits, self._scores = sampled, None, None
        pending = Pending(sampled, self._started, None if scores is None else lambda: PromptResults(scores))
        self._in_flight.append((plan, pending))
        return [] if sampled is None else sampled.arrays()

    @refusable
    @_or_forget
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, and bring its results to the host. If it failed, the caches are
        emptied.
        """
        started = time.perf_counter()
        plan, pending = self._in_flight.popleft()
        if plan.kind is StepKind.MIXED:
            mx.eval(self.arena.arrays())
        result = read(pending)
        if any((s.first + s.count) % _GROWN == 0 or s.count > 1 for s in plan.segments):
            mx.clear_cache()
        self.wait_seconds += time.perf_counter() - started
        return result

    def reset(self) -> None:
        """Forget the last step. The caches keep their content, since the next prompt may begin with it."""
        self._newest = self._sampler = self._plan = self._logits = self._scores = None

    def forget(self) -> None:
        """Forget everything after a step that failed, the content of the caches included."""
        self._in_flight.clear()
        self.reset()
        self.arena.rewind(0)

    def settle(self, ops: StateOps) -> None:
        """`reset`. The row's state is in mlx-lm's caches."""
        self.reset()

    def _forward(self, plan: StepPlan, segment: Segment) -> tuple[mx.array | None, TokenScores | None]:
        """Return the logits `[1, vocab]` of the step's last token, if they are wanted, and the scores, if there are
        any.
        """
        if segment.first != self.arena.length:
            raise KVBlockError(
                f"a step begins at token {segment.first}, but the caches have {self.arena.length}: this is a fault of "
                "the scheduler, please report it"
            )
        tokens = self._tokens(plan)[None]
        if plan.scoring is None:
            return self._run(tokens, bool(segment.logits)), None
        before, end = int(plan.scoring.rows[0]), int(plan.scoring.rows[-1]) + 1
        if before:
            self.arena.run(tokens[:, :before])
        logits: list[mx.array] = []

        def compute(part: slice) -> mx.array:
            logits[:] = [self.arena.run(tokens[:, before:end][:, part])]
            return logits[0][0]

        scores = scores_of(compute, plan.scoring.tokens, plan.scoring.top, rows_at_once(self._vocab_size))
        if end < segment.count:
            return self._run(tokens[:, end:], bool(segment.logits)), scores
        return logits[0][:, -1] if bool(segment.logits) else None, scores

    def _run(self, tokens: mx.array, needs_logits: bool) -> mx.array | None:
        if not needs_logits:
            self.arena.run(tokens)
            return None
        if tokens.shape[1] > 1:
            self.arena.run(tokens[:, :-1])
        return self.arena.run(tokens[:, -1:])[:, -1]

    def _tokens(self, plan: StepPlan) -> mx.array:
        if plan.tokens is not None:
            return mx.array(plan.tokens)
        assert self._newest is not None
        return self._newest.tokens
