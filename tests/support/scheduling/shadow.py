"""A machine that carries out plans on numbers instead of tensors, and distrusts every one of them.

The fake model's "keys and values" of position p are a number that depends on all tokens up to p, and its next token
depends on that number and on the request's seed. So what each request must answer is known beforehand, every slot of
the arena can be checked for whose token it holds, and a step that reads a wrong, stale or unwritten slot is caught at
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import GONE, PrefixEntry, PrefixNode
from cortexmlx.kv.snapshots import Row, StateOps
from cortexmlx.kv.step import BlockCopy, GroupStep
from cortexmlx.scheduling import plan as step_memory
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import SCRATCH_SLOT, Flush, Segment, StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from support.scheduling.requests import commit
from support.scheduling.stories import Story, number_after


class Numbers(Protocol):
    """What a request must compute."""

    def number(self, position: int) -> int: ...


WRONG = -7
"""The number of a drafted token that is wrong."""


class ShadowStates:
    """Rows' states after their last step, by the tokens that they come after: several where drafts may be taken back;
    and snapshots, with the tokens that they come after. Each is the number of its newest token.
    """

    def __init__(self, cache: KVCache, stories: Mapping[int, Numbers]) -> None:
        self._cache = cache
        self._stories = stories
        self._rows: dict[Row, dict[int, int]] = {}
        self._snapshots: dict[int, tuple[int, int]] = {}

    def carry_out(self, plan: StepPlan, right_ends: Mapping[int, int]) -> None:
        """What a step does with states. All rows must have the state of the text so far. Drafts are right up to
        `right_ends`, by job.
        """
        if not self._cache.states.has_states:
            assert plan.states == StateOps()
            return
        self.settle(plan.states)
        cuts = {(cut.row, cut.tokens): cut.snapshot for cut in plan.states.step_snapshots}
        assert len(cuts) == len(plan.states.step_snapshots)
        for segment in plan.segments:
            row, end = (segment.job, segment.generation), segment.first + segment.count
            if not segment.live:
                continue
            wanted = self._after(segment.job, segment.first)[1] if segment.first else None
            found = self._rows.get(row, {}).get(segment.first)
            assert found == wanted, f"job {segment.job} goes on with a state that is not its own"
            for place in range(segment.first + 1, end + 1):
                if (row, place) in cuts:
                    assert len(segment.logits) < 2 or place <= segment.logits.start + 1, "a state after a draft is kept"
                    self._snapshots[cuts.pop((row, place))] = self._after(segment.job, place)
            places = range(segment.first, end + 1) if len(segment.logits) > 1 else [end]
            right = right_ends[segment.job]
            self._rows[row] = {p: self._after(segment.job, p)[1] if p <= right else WRONG for p in places if p}
        assert not cuts, "a state is to be kept that the step does not compute"

    def restore(self, snapshot: int, numbers: Sequence[int]) -> None:
        """Load a snapshot from disk."""
        assert snapshot not in self._snapshots
        tokens, number = numbers
        self._snapshots[snapshot] = int(tokens), int(number)

    def snapshot(self, name: int) -> tuple[int, int] | None:
        """The tokens that a snapshot comes after, and their number; None if it is not saved yet."""
        return self._snapshots.get(name)

    def settle(self, ops: StateOps) -> None:
        """What is done before a step, or when nothing is left to do."""
        for save in ops.saves:
            assert save.snapshot not in self._snapshots
            self._snapshots[save.snapshot] = save.tokens, self._rows[save.row][save.tokens]
        for begin in ops.begins:
            assert begin.row not in self._rows and self._snapshots[begin.snapshot][0] == begin.tokens
            self._rows[begin.row] = dict([self._snapshots[begin.snapshot]])
        for snapshot in ops.drops:
            self._snapshots.pop(snapshot, None)
        for row in ops.ends:
            self._rows.pop(row, None)

    def nothing_is_left_but_snapshots(self) -> None:
        """When nothing runs, no row has a state; all snapshots are those that the cache knows."""
        self.settle(self._cache.states.take_ops())
        assert not self._rows, "the state of a row that is gone is still there"
        snapshots = self._cache.states.snapshots
        assert self._snapshots.keys() == (set() if snapshots is None else snapshots.numbers()), "a snapshot is lost"

    def _after(self, job: int, tokens: int) -> tuple[int, int]:
        return tokens, self._stories[job].number(tokens - 1)


JUNK = -1
"""What a slot holds that nobody has written since it was free: a NaN in a real arena."""
ZERO = 0


class Shadow:
    """The arena and the tail as numbers, and what is in flight."""

    def __init__(self, scheduler: Scheduler, vocab: int) -> None:
        self.scheduler = scheduler
        self.cache: KVCache = scheduler.cache
        self.vocab = vocab
        self.stories: dict[int, Story] = {}
        self.states = ShadowStates(self.cache, self.stories)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.blocks = tuple(-1 for _ in self.cache.groups)
        self._arena: list[np.ndarray] = [np.zeros(0, np.int64) for _ in self.cache.groups]
        self._tail: list[np.ndarray] = []
        self._groups: tuple[GroupStep, ...] = ()
        self._last: list[int] = []
        self.resize(self.cache.pools.blocks)

    # -- what the engine's core does ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan and carry out the next step; its results wait in `in_flight`."""
        plan = self.scheduler.plan(len(self.in_flight))
        if plan is not None:
            self.in_flight.append((plan, self._carry_out(plan)))
        return plan

    def commit(self) -> None:
        """Hand the oldest results to the scheduler, and check them against the stories."""
        plan, tokens = self.in_flight.popleft()
        for row in commit(self.scheduler, plan, tokens, 0.001):
            wanted, end = self.stories[row.job.id].answer(), row.job.num_generated
            came = wanted[end - len(row.tokens) : end]
            assert list(row.tokens) == came, f"job {row.job.id} got wrong tokens before its token {end}"
            assert (row.finish_reason is not None) == (end == len(wanted))

    def next_tokens(self, job: Job, count: int) -> list[int]:
        """The next tokens of a job's text, as far as it goes without dropping any."""
        story, known = self.stories[job.id], len(job.tokens)
        most = count if job.keep is None else min(count, job.keep.max_row_tokens - known)
        return [story.token(known + place) for place in range(most)]

    def step(self) -> None:
        """What `EngineCore.step` does."""
        plan = self.plan()
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self.commit()
        elif plan is None:
            assert self.scheduler.is_idle, "there are requests but nothing to compute"

    def finish(self, bound: int) -> None:
        """Steps until everything has ended; within any `bound` of them somebody must get a token."""
        tokens, since = -1, 0
        while not (self.scheduler.is_idle and not self.in_flight):
            self.step()
            now = sum(story.job.num_generated for story in self.stories.values())
            tokens, since = now, 0 if now != tokens else since + 1
            assert since < bound, f"no token for {bound} steps"

    def compact(self) -> None:
        """What `EngineCore.compact` does."""
        self.copy(self.cache.compact())

    def check_shared(self) -> None:
        """Every cached block holds the numbers of its own text, of committed tokens only."""
        size, prefix = self.cache.block_size, self.cache.prefix
        numbers: dict[PrefixNode, list[int]] = {}
        for entry in prefix.entries:
            chain: list[PrefixNode] = [entry]
            while isinstance(chain[-1], PrefixEntry) and chain[-1] not in numbers:
                chain.append(chain[-1].parent)
            for node in reversed(chain):
                last = numbers[node.parent][-1] if isinstance(node, PrefixEntry) and node.parent in numbers else None
                for token in node.tokens if isinstance(node, PrefixEntry) and node not in numbers else ():
                    last = number_after(last, token)
                    numbers.setdefault(node, []).append(last)
            for group, block in enumerate(entry.blocks):
                if block != GONE:
                    held = self._arena[group][block * size : block * size + len(entry.tokens)].tolist()
                    assert held == numbers[entry], f"block {block} of group {group} holds another text"
        for job_id, sequence in self.cache.tables.sequences.items():
            story = self.stories[job_id]
            shared, node = [], sequence.parent
            while isinstance(node, PrefixEntry):
                shared[:0], node = node.tokens, node.parent
            committed = story.job.tokens
            assert list(committed[: len(shared)]) == shared, f"job {job_id} shares what it has not committed"

    # -- carrying out a plan ------------------------------------------------------------------------------------------

    def _carry_out(self, plan: StepPlan) -> list[int]:
        writes = plan.kind is not StepKind.DECODE or plan.flush is not None or bool(plan.copies or plan.loads)
        assert not (writes and self.in_flight), "the arena is written while a step is in flight"
        assert plan.blocks == self.cache.pools.blocks
        step_memory.prepare_memory(plan, self)
        tokens, ends, flat = self._inputs(plan), {}, 0
        for segment in plan.segments:
            ends[segment.job] = self._right_end(segment, tokens, flat)
            flat += segment.count
        self.states.carry_out(plan, ends)
        if writes:
            self._poison()
        if plan.kind is StepKind.FLUSH:
            assert (plan.flush is not None or plan.loads) and not plan.segments
            return []
        if plan.groups is not None:
            self._groups = plan.groups
        counts = [s.count for s in plan.segments]
        assert counts == sorted(counts, key=lambda c: c > 1), "single tokens come first"
        if plan.kind is StepKind.MIXED:
            self._prefill(plan, tokens)
        else:
            self._decode(plan, tokens)
        self._last = self._sample(plan, tokens)
        return self._last

    def _inputs(self, plan: StepPlan) -> list[int]:
        if plan.tokens is not None:
            tokens = [int(t) for t in plan.tokens]
        else:
            source = range(len(self._last)) if plan.source is None else plan.source.tolist()
            tokens = [self._last[i] for i in source]
        assert len(tokens) == len(plan.positions) == sum(s.count for s in plan.segments)
        flat = 0
        for segment in plan.segments:
            for position in range(segment.first, segment.first + segment.count):
                if segment.live:
                    assert plan.positions[flat] == position
                    drafted = position > segment.logits.start
                    right = position < self._right_end(segment, tokens, flat - position + segment.first)
                    assert right or drafted, f"job {segment.job} is fed a wrong token at {position}"
                flat += 1
        return tokens

    def _prefill(self, plan: StepPlan, tokens: list[int]) -> None:
        numbers, ends = np.full(len(tokens), WRONG, np.int64), {}
        flat = 0
        for s in plan.segments:
            ends[s.job] = end = self._right_end(s, tokens, flat)
            numbers[flat : flat + end - s.first] = [self.stories[s.job].number(p) for p in range(s.first, end)]
            flat += s.count
        assert len(plan.writes) == len(self._groups)
        for group, write in enumerate(plan.writes):
            self._write(group, write.slots, numbers, write.zeros)
        for group, part in enumerate(self._groups):
            singles = [s for s in plan.segments if s.count == 1]
            for row, segment in enumerate(singles):
                self._read_row(group, part, row, segment.job, segment.first + 1, segment.first)
            several = [s for s in plan.segments if s.count > 1]
            flat = len(singles)
            for segment, piece in zip(several, part.pieces, strict=True):
                assert (piece.begin, piece.end) == (flat, flat + segment.count)
                flat = piece.end
                begin, end = segment.first - piece.first, segment.first + segment.count
                assert piece.tokens == end - begin and begin % self.cache.block_size == 0
                oldest = self._oldest(group, segment.first)
                slots = piece.slots
                if piece.run is not None:
                    slots = self._of_run(piece.run, piece.tokens)
                assert slots is not None and begin <= oldest
                right = ends[segment.job]
                self._expect(group, slots[oldest - begin : right - begin], segment.job, oldest, right)

    def _right_end(self, segment: Segment, tokens: list[int], flat: int) -> int:
        """The position of the first token of a segment that is not its story's: a draft that is wrong."""
        story, fed = self.stories[segment.job], range(segment.first, segment.first + segment.count)
        if not segment.live:
            return fed.stop
        return next((p for p in fed if tokens[flat + p - fed.start] != story.token(p)), fed.stop)

    def _decode(self, plan: StepPlan, tokens: list[int]) -> None:
        if plan.column == 0:
            assert plan.groups is not None
            shape = (len(plan.segments), plan.columns)
            self._tail = [np.full(shape, JUNK, np.int64) for _ in self.cache.groups]
        else:
            assert plan.groups is None
            assert all(tail.shape[1] == plan.columns for tail in self._tail), "a window's tail keeps its columns"
        for row, segment in enumerate(plan.segments):
            assert segment.count == 1
            for group, part in enumerate(self._groups):
                if not segment.live:
                    continue
                story = self.stories[segment.job]
                self._tail[group][row, plan.column] = story.number(segment.first)
                base = segment.first - plan.column
                self._read_row(group, part, row, segment.job, base, segment.first)
                found = self._tail[group][row, : plan.column + 1].tolist()
                wanted = [story.number(p) for p in range(base, segment.first + 1)]
                assert found == wanted, f"the tail of job {segment.job} is not its own"

    def _read_row(self, group: int, part: GroupStep, row: int, request: int, stored: int, query: int) -> None:
        """What the query at a position finds of a row with `stored` tokens in the arena. Whole blocks are read, so that
        nothing in them may be junk; of a run, only what is seen.
        """
        length, size = int(part.lengths[row]), self.cache.block_size
        begin, oldest = stored - length, min(self._oldest(group, query), stored)
        assert begin % size == 0 and 0 <= begin <= oldest
        used = self.cache.tables.blocks_for(length)
        table = part.tables[row]
        assert (table[used:] == self.blocks[group]).all(), "padding must be the null block"
        slots = (table[:used, None].astype(np.int64) * size + np.arange(size)).reshape(-1)
        self._expect(group, slots[oldest - begin : length], request, oldest, stored)
        assert (self._arena[group][slots] != JUNK).all(), f"junk behind the last token of job {request}"
        run = part.runs[row]
        if run is not None:
            self._expect(group, self._of_run(run, length)[oldest - begin :], request, oldest, stored)

    def _oldest(self, group: int, position: int) -> int:
        """The oldest token that a query at a position sees."""
        spec = self.cache.groups[group].spec
        if spec.window is None:
            return 0
        return position // spec.window * spec.window if spec.chunked else max(0, position - spec.window + 1)

    def _of_run(self, run: KVHandle, tokens: int) -> np.ndarray:
        size = self.cache.block_size
        assert run.start >= 0 and tokens <= run.count * size
        return np.arange(run.start * size, run.start * size + tokens)

    def _expect(self, group: int, slots: np.ndarray, request: int, begin: int, end: int) -> None:
        story = self.stories[request]
        story.up_to(end)
        found = self._arena[group][slots].tolist()
        assert found == story.numbers[begin:end], f"job {request} reads slots that are not its own, in group {group}"

    def _sample(self, plan: StepPlan, tokens: list[int]) -> list[int]:
        assert len(plan.token_index) == len(plan.logit_rows) == sum(len(s.logits) for s in plan.logit_segments)
        results: list[int] = []
        places = iter(plan.token_index.tolist())
        firsts = dict(zip(plan.segments, accumulate((s.count for s in plan.segments), initial=0), strict=False))
        for segment in plan.logit_segments:
            right = self._right_end(segment, tokens, firsts[segment])
            for position in segment.logits:
                place = next(places)
                if not segment.live:
                    results.append(0)
                    continue
                job = self.stories[segment.job].job
                wanted = position + 1 + len(job.dropped_tokens) - job.prompt_length
                assert place == wanted, "the token index must not depend on the schedule"
                drafted = position - segment.logits.start
                if job.needs_history and plan.groups is not None:
                    assert place == job.num_generated + drafted, "the sampler begins without tokens that are in flight"
                # Behind a wrong draft anything is chosen, and must not count.
                results.append(
                    self.stories[segment.job].token(position + 1) if position < right else position % self.vocab
                )
        return results

    # -- the arena ----------------------------------------------------------------------------------------------------

    def _write(self, group: int, slots: np.ndarray, values: np.ndarray, zeros: np.ndarray) -> None:
        arena, size = self._arena[group], self.cache.block_size
        slots = np.where(slots == SCRATCH_SLOT, len(arena) - 1, slots)
        every = np.concatenate([slots, zeros])
        assert len(slots) == len(values)
        owned = every[every != len(arena) - 1]
        assert ((owned >= 0) & (owned < self.blocks[group] * size)).all(), "a write outside the arena as it is by then"
        assert len(set(owned.tolist())) == len(owned), "two writes to one slot"
        arena[slots] = values
        arena[zeros] = ZERO

    def flush(self, flush: Flush) -> None:
        """See `StepMemory`."""
        assert all(flush.columns <= tail.shape[1] for tail in self._tail)
        for group, write in enumerate(flush.writes):
            self._write(group, write.slots, self._tail[group][:, : flush.columns].reshape(-1), write.zeros)

    def load(self, loads: Sequence[PieceLoad]) -> None:
        """See `StepMemory`."""
        size = self.cache.block_size
        targets = [(load.group, load.target) for load in loads]
        assert len(set(targets)) == len(targets), "two loads to one place"
        for load in loads:
            (numbers,) = load.content.arrays
            if load.group == STATE:
                self.states.restore(load.target, numbers)
            else:
                assert load.target < self.blocks[load.group], "a load outside the arena"
                self._arena[load.group][load.target * size : (load.target + 1) * size] = numbers

    def holds(self, group: int, target: int) -> tuple[int, ...] | None:
        """The numbers of a block, or of a snapshot; None if that is not saved yet."""
        if group == STATE:
            return self.states.snapshot(target)
        size = self.cache.block_size
        return tuple(self._arena[group][target * size : (target + 1) * size].tolist())

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """See `StepMemory`."""
        offsets = np.arange(self.cache.block_size)
        for group, arena in enumerate(self._arena):
            pairs = [(c.source, c.target) for c in copies if c.group == group]
            if not pairs:
                continue
            source, target = (
                np.array(side)[:, None] * self.cache.block_size + offsets for side in zip(*pairs, strict=True)
            )
            assert max(source.max(), target.max()) < self.blocks[group] * self.cache.block_size, (
                "a copy outside the arena"
            )
            arena[target] = arena[source]

    def resize(self, blocks: Sequence[int]) -> None:
        """See `StepMemory`."""
        size = self.cache.block_size
        for group, arena in enumerate(self._arena):
            count, keep = blocks[group], min(blocks[group], max(self.blocks[group], 0))
            fresh = np.full((count + 2) * size, JUNK, np.int64)
            fresh[: keep * size] = arena[: keep * size]
            fresh[count * size : (count + 1) * size] = ZERO
            self._arena[group] = fresh
        self.blocks = tuple(blocks)

    def _poison(self) -> None:
        """Free blocks and the scratch block hold junk from now on."""
        size = self.cache.block_size
        for group, arena in enumerate(self._arena):
            for run in self.cache.pools[group].allocator.free_runs():
                arena[run.start * size : run.stop * size] = JUNK
            arena[(self.blocks[group] + 1) * size :] = JUNK
